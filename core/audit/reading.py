"""What one sample says, read back from its ids, and what its prompt had declared.

Text comes from the ids alone (segments of the completion), never from the reply: the ids are what
is trained on. Knows tokenizers and JSON schemas, nothing about files. Keeps no messages, so 83,000
prompts fit in memory.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from typing import Any

import jsonschema
import msgspec
from jsonschema.protocols import Validator
from referencing import Registry
from referencing.exceptions import Unresolvable

from core.render.base import Renderer
from core.render.tokenizer import NAMED_OFFSETS
from core.schema import Arm, Prompt, Sample, Segment, Tool

MARKERS = tuple(n for n in NAMED_OFFSETS if n.startswith("<") and "header" not in n)
"""Kimi's structural tokens; the header ids are of another family, and it never writes them."""
_MARKER = re.compile("|".join(re.escape(m) for m in MARKERS) + r"|<\|[a-z_]{3,40}\|>")
_MARKER_BYTES = re.compile(_MARKER.pattern.encode())
_STRUCTURE = ("marker", "end")
_NO_FETCH: Registry[Any] = Registry()
_MAX_SCHEMA_NOTE = 160
# A `$ref` to nowhere, a bad `pattern` and a loop of references show only while validating.
_BROKEN_SCHEMA = (Unresolvable, re.error, RecursionError, jsonschema.exceptions.UnknownType)


class Toolbox:
    """The declared functions of one prompt with their compiled Draft 7 validators.

    A `$ref` out of the document is never fetched: such a schema is unusable.
    """

    def __init__(self, tools: Iterable[Tool]) -> None:
        self.schemas: dict[str, dict[str, Any]] = {}
        self.broken: dict[str, str] = {}
        self._validators: dict[str, Validator] = {}
        for tool in tools:
            function = tool.get("function", tool)
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                continue
            schema = function.get("parameters")
            self.schemas[function["name"]] = schema if isinstance(schema, dict) else {}

    def __contains__(self, name: str) -> bool:
        return name in self.schemas

    def __len__(self) -> int:
        return len(self.schemas)

    def error(self, name: str, arguments: Any) -> str | None:
        """The first way in which `arguments` break the schema of `name`, None when they do not (or
        it is no schema)."""
        validator = self._validator(name)
        if validator is None:
            return None
        try:
            found = next(iter(validator.iter_errors(arguments)), None)
        except _BROKEN_SCHEMA as e:
            self.broken[name] = f"{type(e).__name__}: {e}"[:_MAX_SCHEMA_NOTE]
            return None
        if found is None:
            return None
        return f"{found.json_path}: {found.message}"[:_MAX_SCHEMA_NOTE]

    def _validator(self, name: str) -> Validator | None:
        if name in self.broken:
            return None
        if name not in self._validators:
            schema = self.schemas[name]
            try:
                jsonschema.Draft7Validator.check_schema(schema)
            except jsonschema.exceptions.SchemaError as e:
                self.broken[name] = e.message[:_MAX_SCHEMA_NOTE]
                return None
            self._validators[name] = jsonschema.Draft7Validator(schema, registry=_NO_FETCH)
        return self._validators[name]


class Toolboxes:
    """One Toolbox per distinct declaration. Datasets repeat theirs; compiling costs milliseconds
    each."""

    def __init__(self) -> None:
        self._by_hash: dict[bytes, Toolbox] = {}

    def get(self, tools: bytes) -> Toolbox | None:
        """`tools` as JSON; null and an empty list mean that nothing was declared."""
        if tools in (b"null", b"[]", b""):
            return None
        key = hashlib.blake2b(tools, digest_size=16).digest()
        if key not in self._by_hash:
            self._by_hash[key] = Toolbox(msgspec.json.decode(tools, type=list[Tool]))
        return self._by_hash[key]


class Asked(msgspec.Struct, kw_only=True):
    """What the audit needs to know of a prompt.

    `calls_before`: tool calls in its history, so the first call of a native reply is number
    `calls_before`. `quoted`: marker-like strings that the prompt itself holds; repeating one is no
    leak.
    """

    prompt_id: str
    twin_id: str
    dataset: str
    arm: Arm
    backend: str = ""
    thinking: bool = True
    tools: Toolbox | None = None
    calls_before: int = 0
    quoted: frozenset[str] = frozenset()


class _Line(msgspec.Struct, kw_only=True):
    """A Prompt line with its bulky parts left as bytes."""

    prompt_id: str
    twin_id: str
    dataset: str
    messages: msgspec.Raw
    tools: msgspec.Raw = msgspec.Raw(b"null")
    arm: Arm = "declared"
    backend: str = ""
    thinking: bool = True


class _HistoryTurn(msgspec.Struct, kw_only=True):
    tool_calls: list[msgspec.Raw] | None = None


_decode_line = msgspec.json.Decoder(_Line).decode
_decode_history = msgspec.json.Decoder(list[_HistoryTurn]).decode


def asked_from_line(line: bytes, toolboxes: Toolboxes) -> Asked:
    """One line of prompts.jsonl. Raises msgspec.DecodeError on anything else."""
    try:
        prompt = _decode_line(line)
    except msgspec.DecodeError:
        prompt = _decode_line(_without_surrogates(line))
    raw = bytes(prompt.messages)
    calls = 0
    if b'"tool_calls"' in raw:
        calls = sum(len(turn.tool_calls or ()) for turn in _decode_history(raw))
    return Asked(
        prompt_id=prompt.prompt_id,
        twin_id=prompt.twin_id,
        dataset=prompt.dataset,
        arm=prompt.arm,
        backend=prompt.backend,
        thinking=prompt.thinking,
        tools=toolboxes.get(bytes(prompt.tools)),
        calls_before=calls,
        quoted=_quoted(raw + bytes(prompt.tools)),
    )


def _without_surrogates(line: bytes) -> bytes:
    """msgspec refuses lone surrogates. A prompt with one is never sent, but it stays in the file
    and must not stop the audit of the others."""
    try:
        return json.dumps(json.loads(line), ensure_ascii=False).encode("utf-8", "replace")
    except (ValueError, RecursionError):
        return line


def asked(prompt: Prompt, toolboxes: Toolboxes) -> Asked:
    """The same from a Prompt record."""
    return asked_from_line(msgspec.json.encode(prompt), toolboxes)


def _quoted(raw: bytes) -> frozenset[str]:
    if b"<" not in raw:
        return frozenset()
    return frozenset(m.decode() for m in _MARKER_BYTES.findall(raw))


class Reading(msgspec.Struct, kw_only=True):
    """A completion taken apart. `spans` are (kind, first, past-the-last) in positions of
    `token_ids`.

    `reasoning` is None when the completion has no reasoning segment; texts keep every byte of
    whitespace. `closes` counts `</think>`, None where the family has none; `strays` are positions
    of special ids inside text segments.
    """

    ids: list[int]
    spans: list[tuple[str, int, int]]
    reasoning: str | None
    content: str
    closes: int | None
    ended: bool
    strays: list[int]

    @property
    def answered(self) -> bool:
        return bool(self.content.strip())


class Reader:
    """Takes completions apart with one renderer's tokenizer and grammar."""

    def __init__(self, renderer: Renderer) -> None:
        self.tokenizer = renderer.tokenizer
        self._end = renderer.end_id
        self._close = renderer.grammar.think_close if renderer.grammar else None
        self._specials = frozenset(self.tokenizer.specials.values())

    def read(self, sample: Sample) -> Reading:
        """Decode the segments of a sample. A rejected rollout without ids reads as empty."""
        ids = sample.completion_ids
        spans = absolute_spans(sample)
        texts: dict[str, list[str]] = {"reasoning": [], "content": []}
        strays: list[int] = []
        for kind, start, end in spans:
            if kind in _STRUCTURE:
                continue
            part = sample.token_ids[start:end]
            if not self._specials.isdisjoint(part):
                strays += [start + i for i, t in enumerate(part) if t in self._specials]
            if kind in texts:
                texts[kind].append(self.tokenizer.decode(part))
        return Reading(
            ids=ids,
            spans=spans,
            reasoning="".join(texts["reasoning"]) if texts["reasoning"] else None,
            content="".join(texts["content"]),
            closes=None if self._close is None else ids.count(self._close),
            ended=bool(ids) and ids[-1] == self._end,
            strays=strays,
        )


def absolute_spans(sample: Sample) -> list[tuple[str, int, int]]:
    """Segments in positions of `token_ids`. The first one starts where the completion starts."""
    segments: list[Segment] = sample.segments
    if not segments:
        return []
    shift = sample.prompt_len - segments[0].start
    return [(s.kind, s.start + shift, s.end + shift) for s in segments]


def markers_in(text: str) -> list[str]:
    """Strings in ordinary text that look like Kimi's structural tokens."""
    if "<" not in text:
        return []
    return _MARKER.findall(text)


def ends_in_fragment(text: str) -> str | None:
    """A tail that is the beginning of a marker (three characters or more after `<|`), as in case
    C22."""
    at = text.rfind("<")
    tail = text[at:] if at >= 0 else ""
    if len(tail) < 5 or not tail.startswith("<|"):
        return None
    return tail if any(m.startswith(tail) and m != tail for m in MARKERS) else None


def parse_arguments(arguments: str) -> Any:
    """Strict JSON (no NaN, no Infinity). Raises ValueError or RecursionError."""
    return json.loads(arguments, parse_constant=_no_constant)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def canonical_arguments(arguments: str) -> str | None:
    """One spelling for equal JSON: sorted keys, no spaces, 1.0 as 1, no escapes beyond need. None:
    not JSON.

    Strings stay as they are: another wording is another argument.
    """
    try:
        value = parse_arguments(arguments)
    except (ValueError, RecursionError):
        return None
    return json.dumps(
        _plain_numbers(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False
    )


def _plain_numbers(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, list):
        return [_plain_numbers(v) for v in value]
    if isinstance(value, dict):
        return {k: _plain_numbers(v) for k, v in value.items()}
    return value
