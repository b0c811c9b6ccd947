"""The fault plan: which faults hit which request. Pure and seeded; what a fault does is in
`distort` and the API shapes.

    rate_limited=7:0.1@Birch,trim_reasoning:1@Cedar,html_body#3
    name[=value][:rate][@scope][#count]

A fault without scope hits every provider of the OpenRouter shape; `@sglang` hits the SGLang shape,
and is refused where that shape has no place for it. What means nothing to a request (a stream's end
to a whole reply, a message's fields to `/generate`) is not drawn for it: hits show in replies. A
draw depends on the seed, the request's content and how often that content was seen, not on the
order of arrival. `script:[...]` replays a given sequence, one item a request, before any rate is
asked.
"""

import difflib
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Container, Sequence
from typing import Any

import msgspec

from core.errors import UsageError

ANSWERS = {
    "rate_limited": "429; value: seconds of Retry-After (1), `none`, or `date12` for a date",
    "platform_limited": "429 of the platform itself, with X-RateLimit-*; value: seconds (1)",
    "no_credit": "402 whatever the credit is",
    "forbidden": "403 moderation",
    "bad_request": "400",
    "request_timeout": "408",
    "server_error": "500",
    "bad_gateway": "502",
    "unavailable": "503; value: seconds of Retry-After, default without",
    "edge_timeout": "524",
    "overloaded": "529",
    "html_error": "502 with an HTML page",
    "html_body": "200 with an HTML page",
    "reset": "connection reset before headers; free",
    "error_in_200": "200 with an error object beside an empty choice; value: its code (429)",
    "choice_error": "200 with choices[].error and finish_reason error",
    "capacity": "429 while value (64) requests are in flight at the provider",
    "hang": "accepts the request and sends nothing; value: seconds until it closes (600)",
}
"""Instead of a generation: nothing is sampled, nothing is billed. At most one hits a request, and
`capacity` only a request that comes on top."""
GENERATION = {
    "old_template": "a default system message in the provider's rendering",
    "other_model": "another distribution and a higher temperature",
    "tools_ignored": "the provider drops the tools",
    "reasoning_ignored": "thinks although thinking is switched off",
    "slow": "latency times value (10)",
}
"""Before sampling."""
TEXT = {
    "trim_reasoning": "value: `both` (default), `left`, `right`",
    "trim_content": "value: `both` (default), `left`, `right`",
    "spaced_markers": "spaces round every marker",
    "unsplit": "reasoning, </think> and answer all in content",
    "answer_as_reasoning": "everything in reasoning, content empty",
    "withheld_reasoning": "reasoning billed but not sent",
    "reasoning_content": "reasoning under `reasoning_content` as well",
    "reasoning_details_only": "reasoning in reasoning_details alone",
    "reasoning_disagrees": "`reasoning` stripped, reasoning_details verbatim",
    "early_tools": "a tool section without </think> before it",
    "rewritten_ids": "call_<hex> instead of functions.NAME:N",
    "renumbered_ids": "functions.NAME:(N + value), default 1",
    "dotless_ids": "functionsNAMEN",
    "shared_ids": "every call gets the first one's id",
    "reserialised_args": "value: `spaced` (default), `compact`, `sorted`",
    "string_args": "arguments encoded twice",
    "newline_args": "a literal newline inside the arguments",
    "lost_calls": "the last call is missing; value `all`",
    "raw_calls": "calls stay in content as markers",
    "section_noise": "stray text between section begin and first call (in content)",
    "cut_marker": "content ends in a piece of a marker",
    "lone_surrogate": "an unpaired surrogate escape in content",
    "replacement": "U+FFFD in content",
}
"""Between sampling and the reply."""
WIRE = {
    "truncated_body": "the JSON stops halfway; value `hard`: the connection as well",
    "blank_lines": "keep-alive white space before the JSON",
    "empty_choices": "choices: [], prompt billed",
    "no_finish": "finish_reason null",
    "no_usage": "usage missing",
    "zero_usage": "usage all zero",
    "wrong_usage": "completion_tokens off by value (1), billed so",
    "wrong_prompt_usage": "prompt_tokens off by value (20), billed so",
    "null_cost": "usage.cost null",
    "string_cost": "usage.cost as a string",
    "nan_cost": "usage.cost NaN, which JSON does not know",
    "negative_cost": "usage.cost -1",
    "no_cost": "usage without a cost",
    "byok": "usage.cost 0, upstream cost in cost_details; value `unsaid`: null there",
    "overcharge": "billed value (2) times the list price",
    "error_mid_stream": "an error event after some deltas; not billed; value: its code (502)",
    "cut_stream": "the connection ends after some deltas, without a last event",
    "no_done": "the stream ends without [DONE]",
    "silent_stream": "one delta, then comments only",
    "lookup_lost": "GET /generation never finds it",
}
"""The form of the reply."""
NUMBERS = (
    "platform_limited",
    "error_in_200",
    "capacity",
    "hang",
    "slow",
    "renumbered_ids",
    "wrong_usage",
    "wrong_prompt_usage",
    "overcharge",
    "error_mid_stream",
    "silent_stream",
)
"""Faults whose value is a number."""
CHOICES = {
    "trim_reasoning": ("both", "left", "right"),
    "trim_content": ("both", "left", "right"),
    "reserialised_args": ("spaced", "compact", "sorted"),
    "lost_calls": ("last", "all"),
    "truncated_body": ("soft", "hard"),
    "byok": ("said", "unsaid"),
}
KINDS = ANSWERS | GENERATION | TEXT | WIRE
NOT_LOCAL = {
    **dict.fromkeys(
        (
            *("null_cost", "string_cost", "nan_cost", "negative_cost", "no_cost", "byok"),
            *("overcharge", "lookup_lost"),
        ),
        "a local server bills nothing",
    ),
    **dict.fromkeys(
        ("reasoning_content", "reasoning_details_only", "reasoning_disagrees"),
        "SGLang's one field for reasoning is reasoning_content",
    ),
}
"""Why a fault has no place in SGLang's shape."""
MESSAGES_ONLY = frozenset(
    (
        *("choice_error", "old_template", "tools_ignored", "reasoning_ignored", "unsplit"),
        *("answer_as_reasoning", "withheld_reasoning", "lost_calls", "raw_calls", "empty_choices"),
        *("rewritten_ids", "renumbered_ids", "dotless_ids", "shared_ids"),
        *("reserialised_args", "string_args", "newline_args"),
    )
)
"""What `/generate`, which knows neither messages nor calls, has no place for."""

_SPEC = re.compile(
    r"(?P<name>\w+)(?:=(?P<value>[^:@#,]*))?(?::(?P<rate>[\d.]+))?"
    r"(?:@(?P<scope>[\w.\-]+))?(?:#(?P<count>\d+))?"
)


class Fault(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One line of the plan. `count`: hits left; None: no limit."""

    name: str
    value: str = ""
    rate: float = 1.0
    scope: str = ""
    count: int | None = None


class Hits:
    """The faults of one request: `"trim_reasoning" in hits`, `hits.value("slow", "10")`."""

    def __init__(self, values: dict[str, str] | None = None) -> None:
        self._values = values or {}

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __bool__(self) -> bool:
        return bool(self._values)

    @property
    def names(self) -> list[str]:
        return list(self._values)

    @property
    def answer(self) -> str | None:
        return next((n for n in self._values if n in ANSWERS), None)

    @property
    def text(self) -> bool:
        """Does any of them change what the reply says?"""
        return any(n in TEXT for n in self._values)

    def value(self, name: str, default: str) -> str:
        return self._values.get(name) or default

    def number(self, name: str, default: float) -> float:
        return float(self.value(name, str(default)))


class Plan:
    """Mixes faults by rate, or replays a script. Mutable only in its counts."""

    def __init__(
        self,
        faults: Sequence[Fault] = (),
        script: Sequence[Sequence[Fault]] = (),
        seed: int = 0,
    ) -> None:
        self.faults = list(faults)
        self.script = [list(item) for item in script]
        self._seed = seed
        self._seen: dict[bytes, int] = {}
        self.hits: Counter[str] = Counter()
        """How many requests each fault was drawn for."""

    def draw(
        self, content: bytes, scope: str, in_flight: int = 0, idle: Container[str] = ()
    ) -> Hits:
        """Faults of the next request with this content. `scope`: the provider's name, or `sglang`;
        `in_flight`: its open requests; `idle`: names that mean nothing to this request."""
        if self.script:
            drawn = [f for f in self.script.pop(0) if _acts(f, in_flight, idle)]
            values = {f.name: f.value for f in drawn}
        else:
            values = self._mix(content, scope, in_flight, idle) if self.faults else {}
        self.hits.update(values.keys())
        return Hits(values)

    def _mix(
        self, content: bytes, scope: str, in_flight: int, idle: Container[str]
    ) -> dict[str, str]:
        key = hashlib.blake2b(content, digest_size=16).digest()
        attempt = self._seen[key] = self._seen.get(key, 0) + 1
        values: dict[str, str] = {}
        for i, fault in enumerate(self.faults):
            if not _in_scope(fault, scope) or fault.count == 0 or fault.name in values:
                continue
            if not _acts(fault, in_flight, idle):
                continue
            if fault.name in ANSWERS and any(n in ANSWERS for n in values):
                continue
            if _uniform(f"{self._seed}/{attempt}/{i}/{fault.name}".encode() + key) < fault.rate:
                values[fault.name] = fault.value
                if fault.count is not None:
                    fault.count -= 1
        return values

    def describe(self) -> dict[str, Any]:
        return {
            "faults": [msgspec.to_builtins(f) for f in self.faults],
            "script_left": len(self.script),
            "hits": dict(self.hits),
            "seed": self._seed,
        }


def parse_plan(spec: str, seed: int = 0) -> Plan:
    """The command line's form: a spec, `script:[...]`, or JSON. Raises UsageError that names the
    nearest fault."""
    text = spec.strip()
    if not text:
        return Plan(seed=seed)
    if text.startswith("script:"):
        return plan_of({"script": _json(text.removeprefix("script:"))}, seed)
    if text[0] in "[{":
        return plan_of(_json(text), seed)
    return Plan(_parse_specs(text), seed=seed)


def plan_of(data: Any, seed: int = 0) -> Plan:
    """From JSON: a list of faults, or {"faults": ..., "script": ..., "seed": ...}; a fault is an
    object or a spec."""
    if isinstance(data, str):
        return parse_plan(data, seed)
    if isinstance(data, list):
        data = {"faults": data}
    if not isinstance(data, dict) or data.keys() - {"faults", "script", "seed"}:
        raise UsageError("faults: write a spec, a list, or {faults, script, seed}")
    faults = [f for item in _as_list(data.get("faults")) for f in _one(item)]
    script = [[f for part in _as_list(item) for f in _one(part)] for item in data.get("script", [])]
    return Plan(faults, script, int(data.get("seed", seed)))


def _as_list(item: Any) -> list[Any]:
    if item is None or item == "ok":
        return []
    return item if isinstance(item, list) else [item]


def _one(item: Any) -> list[Fault]:
    if isinstance(item, str):
        return [] if item in ("", "ok") else _parse_specs(item)
    try:
        fault = msgspec.convert(item, Fault)
    except msgspec.ValidationError as e:
        raise UsageError(f"faults: {e}") from e
    _check(fault, fault.name)
    return [fault]


def _parse_specs(text: str) -> list[Fault]:
    faults = []
    for part in text.split(","):
        found = _SPEC.fullmatch(part.strip())
        if not found:
            usage = "write name[=value][:rate][@provider][#count]"
            raise UsageError(f"fault {part.strip()!r}: {usage}")
        fault = Fault(
            name=found["name"],
            value=found["value"] or "",
            rate=float(found["rate"] or 1),
            scope=found["scope"] or "",
            count=None if found["count"] is None else int(found["count"]),
        )
        _check(fault, part.strip())
        faults.append(fault)
    return faults


def _check(fault: Fault, where: str) -> None:
    if fault.name not in KINDS:
        near = difflib.get_close_matches(fault.name, KINDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(KINDS)}"
        raise UsageError(f"fault {where!r}: no fault is called {fault.name}; {hint}")
    if fault.scope.lower() == "sglang" and fault.name in NOT_LOCAL:
        raise UsageError(f"fault {where!r}: {NOT_LOCAL[fault.name]}; leave out @sglang")
    value = fault.value
    if value and fault.name in NUMBERS and not _is_number(value):
        raise UsageError(f"fault {where!r}: {value!r} is not a number")
    if value and fault.name in CHOICES and value not in CHOICES[fault.name]:
        raise UsageError(f"fault {where!r}: value is one of {', '.join(CHOICES[fault.name])}")
    if value and fault.name in ("rate_limited", "unavailable"):
        seconds = value.removeprefix("date") or "12"
        if value != "none" and not _is_number(seconds):
            raise UsageError(f"fault {where!r}: value is seconds, none, date or dateSECONDS")
    if not 0 <= fault.rate <= 1:
        raise UsageError(f"fault {where!r}: the rate lies in 0..1")


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as e:
        raise UsageError(f"faults: not JSON: {e}") from e


def _in_scope(fault: Fault, scope: str) -> bool:
    if not fault.scope:
        return scope != "sglang"
    return fault.scope.lower() == scope.lower()


def _acts(fault: Fault, in_flight: int, idle: Container[str]) -> bool:
    if fault.name == "capacity":
        return in_flight >= float(fault.value or 64)
    return fault.name not in idle


def _uniform(data: bytes) -> float:
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest(), "little") / 2**56
