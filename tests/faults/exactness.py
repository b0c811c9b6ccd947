"""No wrong ids are admitted: each fault of the embedded gateway, and what the pipeline makes of it.

    python -m tests.faults.exactness [--replies N] [--tape live|corpus|FILE] [--only FAULT ...]

The built-in model is asked once; its true completions are then replayed under one fault at a time,
through the API shape (all providers) and the SGLang shape. The reconstruct stage judges what
arrived, with the local replies as its reference and without any. A sample is wrong when it is
`exact` or `consistent` and its ids, prompt and completion, are not those of the truth file. Prints
a table; exit code 1 when wrong ids were admitted that text or count show.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from aiohttp import ClientSession
from aiohttp.test_utils import TestServer

from core.config import Config
from core.embedded.corpus import FAMILIES
from core.embedded.faults import ANSWERS, KINDS
from core.embedded.gateway import Gateway, arguments
from core.prompts import load_prompts
from core.schema import Prompt
from core.store import RunDir, encode_line
from tests.core.generate.rig import Router, Run, config_of, really_judges
from tests.faults.rig import Gateway as GatewayProcess
from tests.faults.scoring import Score, TruthFile, Wrong, corpus_tape, score, without_local

VALUES: dict[str, tuple[str, ...]] = {
    "rate_limited": ("=0.02",),
    "platform_limited": ("=0.02",),
    "unavailable": ("=0.02",),
    "hang": ("=0.02",),
    "overloaded": ("=0.02",),
    "error_in_200": ("=502",),
    "capacity": ("=2",),
    "slow": ("=1",),
    "trim_reasoning": ("", "=left", "=right"),
    "trim_content": ("", "=left", "=right"),
    "renumbered_ids": ("", "=-1"),
    "reserialised_args": ("", "=compact", "=sorted"),
    "lost_calls": ("", "=all"),
    "truncated_body": ("", "=hard"),
    "wrong_usage": ("", "=-1", "=2"),
    "wrong_prompt_usage": ("", "=2", "=-1"),
}
"""Values that make a fault another one, or quick."""
LOCAL = (
    *("spaced_markers", "trim_reasoning", "trim_content", "early_tools", "lost_calls", "raw_calls"),
    *("other_model", "truncated_body", "cut_stream", "server_error"),
)
"""Faults that are tried on the SGLang shape as well."""
SOMETIMES = 0.25
TRIM = "a blank at the edge of a text is often part of its neighbour's token: same count"
HIDDEN = {
    "trim_reasoning": TRIM,
    "trim_content": TRIM,
    "reserialised_args": "the blanks of JSON are part of its punctuation's tokens: same count",
}
"""Faults that neither text nor count of one reply need show. A local reference shows them where a
provider has them in every reply, given enough replies."""
OTHER_SPLIT = "another split of the same text was sampled, of the same count or billed so"
PATIENT = dict.fromkeys(("first_event_timeout_s", "idle_timeout_s", "total_timeout_s"), 1_800.0)
SILENT = dict.fromkeys(PATIENT, 1.0)
"""For faults under which nothing more comes."""
COLUMNS = ("exact", "consistent", "hypothesis", "mismatch", "unverifiable", "rejected")


class Scenario(NamedTuple):
    """One line of the table. `arm`: whose replies are hit and scored."""

    fault: str
    spec: str = ""
    arm: str = "declared"
    endpoint: str = "generate"
    stream: bool = True

    @property
    def name(self) -> str:
        shape = {"declared": "api", "local": f"sglang {self.endpoint}"}[self.arm]
        return f"{self.spec.partition('@')[0] or 'none'} ({shape})"

    @property
    def always(self) -> bool:
        return ":" not in self.spec


def scenarios(only: Sequence[str] = (), sometimes: bool = True) -> Iterator[Scenario]:
    """No fault; every fault in every reply, and in a quarter of them (one that answers instead of a
    reply only so); some on the SGLang shape, through both of its endpoints."""
    if not only or "none" in only:
        yield Scenario("none")
        yield Scenario("none", stream=False)
        yield Scenario("none", arm="local")
        yield Scenario("none", arm="local", endpoint="chat")
    for number, fault in enumerate(f for f in KINDS if not only or f in only):
        for value in VALUES.get(fault, ("",)):
            if fault not in ANSWERS:
                yield Scenario(fault, fault + value, stream=number % 2 == 0)
            if fault in ANSWERS or sometimes:
                yield Scenario(fault, f"{fault}{value}:{SOMETIMES}", stream=number % 2 == 1)
        if fault in LOCAL:
            for endpoint in ("generate", "chat"):
                rate = f":{SOMETIMES}" if fault in ANSWERS else ""
                yield Scenario(fault, f"{fault}{rate}@sglang", "local", endpoint)


def settings(count: int, url: str, *, arm: str = "declared", twins: bool = False) -> dict[str, Any]:
    """`count` prompts of the corpus through one arm; `twins`: and through the local server."""
    return {
        "dataset": [
            {
                "name": "d",
                "kind": "embedded",
                "limit": count,
                "families": [f for f in FAMILIES if f != "quoted_markers"],  # not sent as messages
                "arm": arm,
                "backend": "sglang" if arm == "local" else "openrouter",
                "twins": count if twins else 0,
            }
        ],
        "sglang": {"urls": [url]},
        "openrouter": {"stream": True},
        "max_in_flight": 16,
        "max_tokens": 400,
        "temperature": 0.6,
        "breaker_error_rate": 1.0,
        "attempts_unpaid": 2,
        "attempts_paid": 1,
        **PATIENT,
    }


class Bench:
    """A gateway, its truth file, and run directories made from its replies."""

    def __init__(self, folder: Path, url: str, truth: Path) -> None:
        self.folder = folder
        self.url = url
        self.truth = TruthFile(truth)
        self.runs = 0

    async def ask(self, spec: str, options: dict[str, Any]) -> tuple[RunDir, Config]:
        """All prompts to their outcome; the run directory as the engine would leave it."""
        url = f"{self.url}/gateway/faults"
        probes = ["ok"] if options["sglang"].get("endpoint") == "chat" else []  # the pre-flight's
        plan = {"script": probes, "faults": [spec] if spec else []}
        async with ClientSession() as session, session.post(url, json=plan) as answer:
            assert answer.status == 200, await answer.text()
        router = Router()
        router.url = self.url
        prompts = load_prompts(config_of(self.url, **dict(options)))
        run = Run(router, prompts, really_judges(), delays_s=(0.0, 0.02), **options)
        await run.generator.run()
        self.runs += 1
        made = RunDir(self.folder / f"run-{self.runs}")
        made.path.mkdir()
        made.prompts.write_bytes(b"".join(encode_line(p) for p in prompts))
        made.completions.write_bytes(b"".join(encode_line(r) for r in run.rollouts))
        return made, run.config

    async def try_one(
        self, scenario: Scenario, count: int, *, provider: str = "", reference: bool = True
    ) -> tuple[Score, Score]:
        """The scores without and with a local reference: the same one for local replies themselves,
        and where none is asked for. `provider`: only this one is asked."""
        api = scenario.arm != "local"
        options = settings(count, self.url, arm=scenario.arm, twins=reference and api)
        options["sglang"]["endpoint"] = scenario.endpoint
        options["openrouter"] = {"stream": scenario.stream, "only": [provider] if provider else []}
        if scenario.fault in ("silent_stream", "hang"):
            options |= SILENT
        run, config = await self.ask(scenario.spec, options)
        beside = score(run, config, self.truth.now(), scenario.arm)
        if not (reference and api):
            return beside, beside
        return score(without_local(run), config, self.truth.now(), scenario.arm), beside


@asynccontextmanager
async def replaying(folder: Path, tape: Path) -> AsyncIterator[Bench]:
    """A gateway in this process that replays a tape."""
    truth = folder / "truth.jsonl"
    options = ["--replay", str(tape), "--latency-scale", "0", "--lookup-lag-s", "0"]
    gateway = Gateway(arguments([*options, "--truth", str(truth)]))
    async with TestServer(gateway.app()) as server:
        yield Bench(folder, str(server.make_url("")).rstrip("/"), truth)
    await gateway.desk.close()
    gateway.arrivals.close()


def api_prompts(count: int) -> tuple[list[Prompt], Config]:
    """What the API arm of `settings` asks, and the config that says so."""
    config = config_of("http://127.0.0.1:1", **settings(count, ""))
    return load_prompts(config), config


async def live_tape(folder: Path, count: int) -> Path:
    """What the built-in model says to all prompts; printed as the measured exactness."""
    truth = folder / "truth.jsonl"
    process = GatewayProcess(folder, "--truth", str(truth), "--latency-scale", "0")
    try:
        url = f"http://127.0.0.1:{process.address['port']}"
        bench = Bench(folder, url, truth)
        run, config = await bench.ask("", settings(count, url, twins=True))
        for arm in ("declared", "local"):
            result = score(run, config, bench.truth.now(), arm)
            print(f"sampled, {arm} arm: {result.exactness()}", flush=True)
    finally:
        process.close()
    return truth


def line(scenario: Scenario, alone: Score, beside: Score) -> str:
    counts = " ".join(f"{alone.verdicts[c]:>5}" for c in COLUMNS)
    start = f"{scenario.name:<38} {alone.replies:>5} {counts} {alone.right:>5}"
    return f"{start} {len(alone.wrong):>5} {len(beside.wrong):>5}  {why(scenario, alone)}"


def why(scenario: Scenario, result: Score) -> str:
    if not result.wrong:
        return ""
    if shown(scenario, result):
        return f"SHOWN: {len(shown(scenario, result))} of them by count or text"
    reasons = []
    if any(not w.non_canonical for w in result.wrong):
        reasons.append(HIDDEN[scenario.fault])
    if splits := sum(w.non_canonical for w in result.wrong):
        reasons.append(f"{splits}: {OTHER_SPLIT}")
    return "; ".join(reasons)


def shown(scenario: Scenario, result: Score) -> list[Wrong]:
    """Wrong ids that should not be admitted: the count shows them, or no listed exception."""
    listed = scenario.fault in HIDDEN
    return [w for w in result.wrong if not w.count_fits or not (w.non_canonical or listed)]


async def table(folder: Path, asked: argparse.Namespace) -> int:
    if asked.tape == "live":
        live = folder / "live"
        await asyncio.to_thread(live.mkdir)
        tape = await live_tape(live, asked.replies)
    elif asked.tape == "corpus":
        tape = corpus_tape(folder / "tape.jsonl", *api_prompts(asked.replies), splits=asked.splits)
    else:
        tape = Path(asked.tape)
    heads = " ".join(f"{c[:5]:>5}" for c in COLUMNS)
    print(
        f"{'fault':<38} {'repl.':>5} {heads} {'right':>5} {'wrong':>5} {'+ref.':>5}  why not shown"
    )
    bad = 0
    async with replaying(folder, tape) as bench:
        for scenario in scenarios(asked.only, not asked.always):
            alone, beside = await bench.try_one(scenario, asked.replies)
            bad += len(shown(scenario, alone)) + len(shown(scenario, beside))
            print(line(scenario, alone, beside), flush=True)
    print(f"wrong ids admitted although text or count show them: {bad}")
    return bad


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--replies", type=int, default=120, help="API prompts, each with a local twin"
    )
    parser.add_argument(
        "--tape", default="live", help="live, corpus, or the truth file of an earlier run"
    )
    parser.add_argument(
        "--splits", type=float, default=0.1, help="corpus: share sampled in another split"
    )
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="FAULT", help="`none` or names of faults"
    )
    parser.add_argument("--always", action="store_true", help="not in a quarter of the replies")
    parser.add_argument("--keep", type=Path, help="folder for the runs; default: temporary")
    asked = parser.parse_args()
    if asked.keep:
        asked.keep.mkdir(parents=True)
        return int(asyncio.run(table(asked.keep, asked)) > 0)
    with tempfile.TemporaryDirectory(prefix="eyas-exact-") as folder:
        return int(asyncio.run(table(Path(folder), asked)) > 0)


if __name__ == "__main__":
    sys.exit(main())
