"""All faults mixed, many thousand requests: `python -m tests.faults.soak [--requests 20000]`.

One gateway replays the corpus's answers under every fault of its list at once, seeded, on both API
shapes; generators of this process ask it, in legs (streams or whole replies, SGLang's `/generate`
or its chat), hundreds in flight, three API providers, a local server and an OpenAI-compatible one,
four datasets and local twins. After each leg: exactly one outcome for each prompt, attempts of a
prompt one after another, the books equal to the gateway's bill generation by generation, no task,
thread or socket left, no warning (asyncio's debug mode, every warning an error), no log line.
Prints a row a leg and what was seen in the end; the first violation is an AssertionError.

Back-off is shortened to tens of milliseconds, as are the faults that wait: how long a wait is has
its own tests."""

import argparse
import asyncio
import ctypes
import gc
import json
import logging
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

from core import events as ev
from core.config import Config, parse
from core.embedded.corpus_calls import CALL_FAMILIES
from core.embedded.corpus_talk import TALK_FAMILIES
from core.embedded.faults import KINDS, NOT_LOCAL
from core.generate import GenerateResult, Generator, Ports, recover
from core.prompts import load_prompts
from core.schema import Prompt, Rollout, SpendLine
from core.store import Appender, RunDir, encode_line, read_jsonl
from tests.core.generate.rig import RealJudge, beside, renderer
from tests.faults.rig import Books, Gateway, check, new_run, wait_for
from tests.faults.scoring import corpus_tape
from tests.faults.seen import HEADER, Seen, columns, row

QUICK = {
    "rate_limited": "=0.05",
    "platform_limited": "=0.05",
    "unavailable": "=0.05",
    "overloaded": "=0.05",
    "capacity": "=48",
    "hang": "=1",
    "slow": "=4",
    "silent_stream": "=0.5",
}
"""Values that make a fault one of tenths of seconds."""
ALSO = (
    *("rate_limited=none", "rate_limited=date1", "error_in_200=502", "error_in_200=503"),
    *("error_mid_stream=429", "truncated_body=hard", "lost_calls=all", "trim_content=left"),
    *("reserialised_args=compact", "wrong_usage=-1", "byok=unsaid", "hang=30"),
)
"""Further forms of a fault."""
NOT_MIXED = ("overcharge",)
"""Stops its provider at once, as it should: a test of its own."""
LOCAL = tuple(name for name in KINDS if name not in NOT_LOCAL)
RATE = 0.008
LOOKUP_DELAYS_S = (0.0, 0.05, 0.2, 0.4)
ACCOUNT_GAPS_S = (0.1, 0.2, 0.4)
SEEDS = 2
"""Legs ask the prompts of so many seeds in turn; what the faults do to them is another draw."""
LIVES = 6
"""A 402 that meets a provider's only request stops it, rightly: such a leg is resumed."""
THROTTLES = frozenset(
    {"rate_limited", "platform_limited", "unavailable", "overloaded", "capacity", "no_credit"}
)
LEGS = (
    *((True, "generate", True), (False, "chat", False), (True, "chat", False)),
    *((False, "generate", True), (True, "generate", False)),
)
"""(stream, SGLang's endpoint, whether anything throttles: it keeps the window small, as it
should)."""


def fault_mix(leg: int) -> str:
    """The plan as the gateway takes it: every fault, in the API shape and in the local one."""
    throttled = LEGS[leg % len(LEGS)][2]
    names = [n for n in KINDS if n not in NOT_MIXED and (throttled or n not in THROTTLES)]
    specs = [f"{name}{QUICK.get(name, '')}:{RATE}" for name in names]
    specs += [f"{form}:{RATE / 2}" for form in ALSO if form.partition("=")[0] in names]
    specs += [f"{name}{QUICK.get(name, '')}:{RATE}@sglang" for name in LOCAL if name in names]
    return json.dumps({"faults": specs, "seed": leg})


def leg_config(gateway: Gateway, prompts: int, leg: int, timeout_s: float = 1.0) -> Config:
    """A fifth of the prompts each: calls declared and as text, and talk (some of it without
    thinking), through the API; local twins; an OpenAI-compatible server."""
    stream, endpoint, _ = LEGS[leg % len(LEGS)]
    part = max(1, prompts // 5)
    talk = [f for f in TALK_FAMILIES if f != "quoted_markers"]
    calls = list(CALL_FAMILIES)
    base: dict[str, Any] = {"kind": "embedded", "limit": part}
    local = gateway.address["base_url_sglang"]
    return parse(
        {
            "run": {"seed": leg % SEEDS, "budget_usd": 1_000.0, "min_free_disk_bytes": 1},
            "dataset": [
                {"name": "calls", "families": calls, "twins": part, **base},
                {"name": "text", "families": calls, "arm": "text", **base},
                {"name": "talk", "families": list(TALK_FAMILIES), **base},
                {"name": "plain", "families": talk, "backend": "openai", **base},
            ],
            "generate": {
                "max_in_flight": 400,
                "temperature": 0.6,
                "max_tokens": 400,
                "canary": 0,
                "first_event_timeout_s": timeout_s,
                "idle_timeout_s": timeout_s,
                "total_timeout_s": 2 * timeout_s,
                "openrouter": {
                    "base_url": gateway.address["base_url_openrouter"],
                    "model": "eyas/embedded",
                    "stream": stream,
                },
                "sglang": {"urls": [local], "endpoint": endpoint, "stream": stream},
                "openai": {"base_url": f"{local}/v1", "model": "eyas/embedded"},
            },
            "tripwires": {"enabled": False},
        },
        "soak",
    )


class Watch(logging.Handler):
    """What must not be: log lines, warnings that nobody could raise, errors of threads."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []
        self.slow_steps = 0

    def emit(self, record: logging.LogRecord) -> None:
        line = f"{record.name}: {record.getMessage()}"
        if record.name == "asyncio" and line.startswith("asyncio: Executing <"):
            self.slow_steps += 1  # a step of the loop over a tenth of a second: the machine's load
        else:
            self.found.append(line)

    @contextmanager
    def watching(self) -> Iterator[None]:
        def unraisable(args: Any) -> None:
            self.found.append(f"unraisable: {args.exc_value!r} in {args.object!r}")

        def thread_error(args: Any) -> None:
            self.found.append(f"thread: {args.exc_value!r}")

        root = logging.getLogger()
        root.addHandler(self)
        try:
            with (
                warnings.catch_warnings(),
                mock.patch.object(sys, "unraisablehook", unraisable),
                mock.patch.object(threading, "excepthook", thread_error),
            ):
                warnings.simplefilter("error")
                yield
        finally:
            root.removeHandler(self)


def short_backoff(failures: int, dice: float) -> float:
    return 0.02 + dice * 0.03


class Leg:
    """One run to its end, in as many lives as it needs."""

    def __init__(
        self, gateway: Gateway, folder: Path, prompts: int, number: int, timeout_s: float
    ) -> None:
        self._gateway = gateway
        self._number = number
        self._faulty = False
        self.config = leg_config(gateway, prompts, number, timeout_s)
        self.run = new_run(self.config, folder, f"leg-{number:03d}")
        self.prompts = load_prompts(self.config)
        self.run.prompts.write_bytes(b"".join(encode_line(p) for p in self.prompts))
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.peak = self.lives = 0

    async def life(self) -> GenerateResult:
        """A generator over the run's own files, and whatever it leaves behind in this process."""
        self.lives += 1
        self._faulty = False
        judge = RealJudge()
        completions, spend = Appender(self.run.completions), Appender(self.run.spend)
        ports = Ports(
            emit=self._emit,
            judge=beside(judge),
            renderer=renderer(),
            completions=completions,
            spend=spend,
            recovered=recover(self.run),
        )
        generator = Generator(self.config, self.prompts, ports, LOOKUP_DELAYS_S, ACCOUNT_GAPS_S)
        try:
            result = await generator.run()
        finally:
            completions.close()
            spend.close()
        for _ in range(3):  # transports close in the loop's next steps
            await asyncio.sleep(0)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"tasks left: {left}"
        return result

    def _emit(self, event: ev.Event) -> None:
        if not self._faulty:  # the first line after the pre-flight, which a fault would refuse
            self._faulty = True
            self._gateway.post("/gateway/faults", fault_mix(self._number))
        if isinstance(event, ev.Stats):
            self.peak = max(self.peak, event.in_flight)
        elif isinstance(event, ev.Outcome) and event.outcome != "aborted":
            self.outcomes[event.prompt_id, event.outcome] += 1

    def finish(self) -> None:
        while self.lives < LIVES:
            self._gateway.post("/gateway/faults", "")
            with asyncio.Runner(debug=True) as runner:
                result = runner.run(self.life())
            if not result.reason:
                return
            assert result.reason == "stopped", result
        raise AssertionError(f"not done after {LIVES} lives: {result}")


def ordered_attempts(run: RunDir) -> Counter[str]:
    """Every attempt of a prompt was closed before the next one left. How they were closed."""
    open_: dict[str, int] = {}
    closings: Counter[str] = Counter()
    for line in read_jsonl(run.spend, SpendLine):
        if line.kind == "dispatch":
            assert line.prompt_id not in open_, f"two attempts of {line.prompt_id} at once"
            open_[line.prompt_id] = line.attempt
        elif line.kind in ("billed", "looked_up", "uncertain", "free"):
            assert open_.pop(line.prompt_id) == line.attempt
            closings[line.kind] += 1
    assert not open_
    return closings


def check_upstream(run: RunDir, bill: dict[str, Any]) -> None:
    """What counts against the cap is what the account and everybody else were billed."""
    upstream = {g["id"]: g["upstream_usd"] for g in bill["generations"]}
    names: dict[tuple[str, int], str] = {}
    for line in read_jsonl(run.spend, SpendLine):
        key = (line.prompt_id, line.attempt)
        if line.generation_id:
            names[key] = line.generation_id
        if line.kind in ("billed", "looked_up"):
            others = upstream.get(names.get(key, ""), 0.0)
            assert abs(line.cap_usd - line.cost_usd - others) < 1e-9, (line, others)


def one_leg(gateway: Gateway, leg: Leg, earlier: set[str]) -> Seen:
    """Run it, check it, and say what was seen. `earlier`: generations of the legs before; added to
    here."""
    me = psutil.Process()
    before = {t.ident for t in threading.enumerate()}
    sockets = len(me.net_connections("tcp"))
    sent_before = len(gateway.get("/gateway/requests")["requests"])
    leg.finish()
    wait_for(lambda: {t.ident for t in threading.enumerate()} <= before, "threads to end", 10)
    wait_for(lambda: len(me.net_connections("tcp")) <= sockets, "sockets to close", 10)
    bill = gateway.bill()
    books: Books = check(leg.run, bill, frozenset(earlier))
    check_upstream(leg.run, bill)
    earlier |= {g["id"] for g in bill["generations"]}
    closings = ordered_attempts(leg.run)
    finals: Counter[tuple[str, str]] = Counter()
    classes: Counter[str] = Counter()
    for rollout in read_jsonl(leg.run.completions, Rollout):
        classes[rollout.error_class or "-"] += 1
        if rollout.final and rollout.outcome != "aborted":
            finals[rollout.prompt_id, rollout.outcome] += 1
    announced = {key: n for key, n in leg.outcomes.items() if key in finals}
    assert announced == dict(finals), "an outcome was not announced once"
    asked = {p.prompt_id for p in read_jsonl(leg.run.prompts, Prompt)}
    assert {p for p, _ in finals} == asked and set(finals.values()) == {1}
    sent = gateway.get("/gateway/requests")
    assert sent["in_flight"] == 0
    requests = len(sent["requests"]) - sent_before
    hits = gateway.get("/gateway/faults")["hits"]
    del bill, sent
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free is not held
    return Seen(
        prompts=len(asked),
        requests=requests,
        lives=leg.lives,
        peak=leg.peak,
        outcomes=books.outcomes,
        classes=classes,
        closings=closings,
        hits=Counter(hits),
        booked_usd=books.spent_usd,
        billed_usd=books.billed_usd,
        unknown=books.uncertain,
        unproven_usd=books.uncertain_usd,
        rss_bytes=me.memory_info().rss,
        objects=len(gc.get_objects()),
    )


def soak(
    folder: Path, requests: int, prompts: int, seed: int = 0, timeout_s: float = 6.0
) -> tuple[Seen, list[Seen]]:
    """Legs of about `prompts` prompts until there were `requests` requests. All, and each leg."""
    tape = folder / "tape.jsonl"
    nowhere: Any = mock.Mock(
        address={"base_url_openrouter": "http://127.0.0.1:1", "base_url_sglang": "http://x"}
    )
    known = [leg_config(nowhere, prompts, seed + n) for n in range(SEEDS)]
    parts = [corpus_tape(folder / f"{n}.jsonl", load_prompts(c), c) for n, c in enumerate(known)]
    tape.write_bytes(
        b"".join(dict.fromkeys(x for p in parts for x in p.read_bytes().splitlines(True)))
    )
    timing = ("--tokens-per-s", "50", "--ttft-s", "0.2", "--latency-scale", "0.5")
    options = ("--replay", str(tape), "--lookup-lag-s", "0.02", *timing)
    gateway = Gateway(folder, *options, "--seed", str(seed))
    total, legs, earlier = Seen(), [], set[str]()
    watch = Watch()
    try:
        with (
            watch.watching(),
            mock.patch("core.generate.landing.backoff_s", short_backoff),
            mock.patch("core.limit.backoff_s", short_backoff),
        ):
            while total.requests < requests:
                begun = time.process_time()
                leg = Leg(gateway, folder, prompts, seed + len(legs), timeout_s)
                seen = one_leg(gateway, leg, earlier)
                total.add(seen)
                legs.append(seen)
                say(row(len(legs), seen, time.process_time() - begun))
                assert not watch.found, watch.found[:5]
    finally:
        gateway.close()
    errors = (folder / "gateway.err").read_text()
    assert not errors, f"the gateway said: {errors[:500]}"
    say(f"steps of the loop over 0.1 s under debug mode: {watch.slow_steps}")
    return total, legs


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--prompts", type=int, default=2_400, help="of one leg, about")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder for the runs; default: temporary")
    asked = parser.parse_args()
    say(HEADER)
    with tempfile.TemporaryDirectory(prefix="eyas-soak-") as temporary:
        folder = asked.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        total, legs = soak(folder, asked.requests, asked.prompts, asked.seed)
    say(row("all", total, time.process_time()))
    say(columns("classes of attempts", total.classes))
    say(columns("dispatches closed as", total.closings))
    say(columns("faults drawn", total.hits))
    grown = legs[-1].rss_bytes - legs[min(1, len(legs) - 1)].rss_bytes
    say(f"memory between leg 2 and the last: {grown / 1e6:+.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
