"""kill -9 with hundreds of streams in flight: `python -m tests.faults.kill_streams --rounds 24`.

One replaying gateway lives through all of it. An engine is killed once at least `--floor` requests
are in flight, at a random moment of the next seconds, and started again on the same run directory.
After every kill: each outcome that was announced or booked has its reply on disk. In the end of a
run: every reply that was ever on disk is still there, no prompt that had its outcome was asked
again (by the prompt ids in the gateway's own record), books and bill are equal. Replies that the
gateway had sent whole and that never reached the disk are counted, with their age at the kill:
bytes of the last moment that the engine had not taken in. Prints a row a kill and a total; the
first violation is an AssertionError."""

import argparse
import json
import random
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from core.config import Config, parse
from core.embedded.corpus import FAMILIES
from core.prompts import load_prompts
from core.schema import Rollout, SpendLine
from core.store import RunDir, read_jsonl
from tests.faults.rig import Engine, Gateway, check, new_run
from tests.faults.scoring import TruthFile, corpus_tape

API = "gen-"
"""Beginning of the API's generation ids; a local server takes ours. Twins have the same prompt."""
SPREAD_S = 3.0
"""A kill falls this long after the floor was reached at most."""


def config_of(address: dict[str, Any], prompts: int, window: int) -> Config:
    """Streams through the API, and a tenth as many whole replies from the local server."""
    families = [f for f in FAMILIES if f != "quoted_markers"]
    api = {"name": "api", "kind": "embedded", "families": families, "limit": prompts}
    return parse(
        {
            "run": {"budget_usd": 1_000.0, "min_free_disk_bytes": 1, "stages": ["generate"]},
            "dataset": [{**api, "twins": prompts // 10}],
            "generate": {
                "max_in_flight": window,
                "max_tokens": 400,
                "canary": 0,
                "openrouter": {
                    "base_url": address["base_url_openrouter"],
                    "model": "eyas/embedded",
                    "stream": True,
                },
                "sglang": {"urls": [address["base_url_sglang"]]},
            },
            "tripwires": {"enabled": False},
        },
        "streams",
    )


def replaying(folder: Path, prompts: int, *options: str) -> Gateway:
    """A gateway that answers the prompts of `config_of` from a tape, and keeps its truth."""
    nowhere = {"base_url_openrouter": "http://x", "base_url_sglang": "http://x"}
    config = config_of(nowhere, prompts, 1)
    tape = corpus_tape(folder / "tape.jsonl", load_prompts(config), config)
    truth = ("--truth", str(folder / "truth.jsonl"), "--books", str(folder / "books.jsonl"))
    return Gateway(folder, "--replay", str(tape), *truth, *options)


def running(gateway: Gateway) -> int:
    """Generations at the gateway now."""
    url = f"{gateway.address['base_url_sglang']}/metrics"
    with urllib.request.urlopen(url, timeout=30) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith("sglang:num_running_reqs"):
                return int(float(line.split()[-1]))
    raise AssertionError("the gateway does not say how many generations run")


class Disk(NamedTuple):
    """What a killed engine had on disk."""

    replies: set[str]
    """Generation ids of stored replies."""
    finished: dict[str, str]
    """Prompt -> generation id of its final reply."""
    keys: set[tuple[str, int]]


def on_disk(run: RunDir) -> Disk:
    disk = Disk(set(), {}, set())
    for rollout in read_jsonl(run.completions, Rollout):
        disk.keys.add((rollout.prompt_id, rollout.attempt))
        if rollout.generation_id:
            disk.replies.add(rollout.generation_id)
        if rollout.final and rollout.outcome != "aborted":
            disk.finished[rollout.prompt_id] = rollout.generation_id or ""
    return disk


def announced(run: RunDir) -> Iterator[tuple[str, int]]:
    """Attempts whose outcome is in the journal, and those that the books have closed at what their
    reply said (a look-up may close one that an earlier kill left without a reply)."""
    for path in sorted(run.journal.glob("*.jsonl")):
        for line in path.read_bytes().splitlines():
            if b'"type":"outcome"' in line and line.endswith(b"}"):
                event = json.loads(line)
                yield event["prompt_id"], event.get("attempt", 1)
    for spent in read_jsonl(run.spend, SpendLine):
        if spent.kind == "billed":
            yield spent.prompt_id, spent.attempt


def sent_whole(gateway: Gateway, since: float) -> dict[str, float]:
    """Generation asked for after `since` -> when its reply had been written to its end, by the
    gateway's own record."""
    rows = gateway.get("/gateway/requests")["requests"]
    return {
        r["generation_id"]: r["ended"]
        for r in rows
        if r["generation_id"]
        and r["t"] >= since
        and (r["status"], r["left"]) == (200, None)
        and r["ended"]
    }


class Kill(NamedTuple):
    in_flight: int
    stored: int
    disk: Disk
    at: float
    lost: int
    lost_age_s: float
    """Age of the oldest reply that the gateway had sent and the disk had not got."""


def kill(gateway: Gateway, engine: Engine, dice: random.Random, floor: int) -> Kill | None:
    """None: the engine ended before so many were in flight."""
    since = time.time()
    moment: float | None = None
    while (in_flight := running(gateway)) < floor or moment is None or time.monotonic() < moment:
        if not engine.alive:
            return None
        if in_flight >= floor and moment is None:
            moment = time.monotonic() + dice.uniform(0.0, SPREAD_S)
        time.sleep(0.02)
    engine.kill()
    at = time.time()
    psutil.wait_procs(engine.orphans, 30)
    disk = on_disk(engine.run)
    missing = set(announced(engine.run)) - disk.keys
    assert not missing, f"{len(missing)} announced or paid, and not on disk: {missing}"[:300]
    sent = sent_whole(gateway, since)
    ages = [at - t for g, t in sent.items() if t <= at and g not in disk.replies]
    return Kill(in_flight, len(disk.replies), disk, at, 0, 0.0)._replace(
        lost=len(ages), lost_age_s=max(ages, default=0.0)
    )


def check_resume(gateway: Gateway, run: RunDir, kills: list[Kill], truth: TruthFile) -> None:
    """Nothing stored has gone; nothing finished was asked again."""
    final = on_disk(run)
    prompt_of = truth.now()
    rows = gateway.get("/gateway/requests")["requests"]
    for one in kills:
        assert one.disk.replies <= final.replies
        assert one.disk.finished.items() <= final.finished.items()
        finished = {
            (g.startswith(API), *prompt_of[g].prompt): p
            for p, g in one.disk.finished.items()
            if g in prompt_of
        }
        for row in rows:
            generation = row["generation_id"]
            if generation and row["t"] > one.at:
                asked = (generation.startswith(API), *prompt_of[generation].prompt)
                again = finished.get(asked)
                assert again is None, f"{again} was finished and asked again ({generation})"


HEADER = (
    f"{'kill':>4} {'run':<12} {'in flight':>9} {'stored':>7} {'finished':>9} "
    f"{'sent, not stored':>17} {'oldest ms':>10}"
)


def rounds(folder: Path, total: int, seed: int, prompts: int, floor: int) -> list[Kill]:
    dice = random.Random(seed)
    speed = ("--tokens-per-s", "15", "--ttft-s", "0.3", "--latency-scale", "1")
    gateway = replaying(folder, prompts, *speed, "--seed", str(seed))
    truth = TruthFile(folder / "truth.jsonl")
    kills: list[Kill] = []
    seen: set[str] = set()
    say(HEADER)
    try:
        for number in range(1, total + 1):
            if len(kills) >= total:
                break
            config = config_of(gateway.address, prompts, floor * 5 // 4)
            run = new_run(config, folder, f"streams-{number:02d}")
            mine: list[Kill] = []
            while len(kills) + len(mine) < total:
                engine = Engine(run)
                one = kill(gateway, engine, dice, floor)
                if one is None:
                    break
                mine.append(one)
                say(
                    f"{len(kills) + len(mine):>4} {run.run_id:<12} {one.in_flight:>9} "
                    f"{one.stored:>7} {len(one.disk.finished):>9} {one.lost:>17} "
                    f"{one.lost_age_s * 1e3:>10.0f}"
                )
            else:
                engine = Engine(run)
            code = engine.wait(600)
            assert code == 0, f"{run.path}: engine ended with {code}; see {run.output_log}"
            bill = gateway.bill()
            books = check(run, bill, frozenset(seen))
            seen |= {g["id"] for g in bill["generations"]}
            check_resume(gateway, run, mine, truth)
            kills += mine
            say(
                f"     {run.run_id}: {dict(books.outcomes)}, one each; booked "
                f"${books.spent_usd:.9f}, billed ${books.billed_usd:.9f}, difference "
                f"${books.spent_usd - books.billed_usd:.0e}; {books.uncertain} without an id, "
                f"${books.uncertain_usd:.9f} unproven"
            )
            assert abs(books.spent_usd - books.billed_usd) < 1e-9
    finally:
        gateway.close()
    return kills


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=2_500, help="of a run")
    parser.add_argument("--floor", type=int, default=500, help="in flight at a kill, at least")
    parser.add_argument("--keep", type=Path, help="folder for the runs; default: temporary")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="eyas-kill-") as temporary:
        folder = asked.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        kills = rounds(folder, asked.rounds, asked.seed, asked.prompts, asked.floor)
    lost = sum(k.lost for k in kills)
    say(
        f"{len(kills)} kills with {min(k.in_flight for k in kills)} to "
        f"{max(k.in_flight for k in kills)} in flight; {sum(k.stored for k in kills)} replies "
        f"on disk at the kills, all kept; {lost} sent by the gateway and not yet on disk, the "
        f"oldest {max(k.lost_age_s for k in kills) * 1e3:.0f} ms before its kill"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
