"""kill -9 at random moments, resume, again: `python -m tests.faults.kill_rounds --rounds 100`.

One gateway lives through all of it, so that its bill is the truth. An engine is killed at a random
moment of the whole line (while it starts, while requests are in flight, in every later stage and
between them) and started again on the same run directory, until the run is done; then the books are
checked and a new run begins, until there were enough kills. Prints a row a run and a total in the
end; the first violation is an AssertionError."""

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from core.events import STAGES
from core.store import RunDir
from tests.faults.rig import Engine, Gateway, check, lines_in, new_run, run_config

ORPHANS_END_S = 60.0
"""A stage whose engine died ends at its next step; until then the next engine's stage waits."""
START_SHARE = 0.1
STAGE_S = 12.0
"""A kill in a stage falls this long after its start at most: about what the longest takes."""
WHOLE_LINE: dict[str, dict[str, Any]] = {
    "run": {"stages": []},
    "extract": {"dtype": "float32", "max_length": 1_024, "batch_tokens": 4_096},
    "draft": {"vocab_size": 512},
    "train": {
        "ttt_steps": 3,
        "lr": 3e-3,
        "batch_tokens": 1_024,
        "epochs": 2,
        "checkpoint_every": 2,
        "threads": 1,
    },
    "eval": {"decode_prompts": 4, "max_new_tokens": 32, "holdout": 0.2},
}


class Progress:
    """Which stage a run is in, from the tail of its journal."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._read: dict[Path, int] = {}
        self.stage = "start"
        self.done: set[str] = set()
        self.look()

    def begin(self) -> None:
        """A new engine: nothing runs yet."""
        self.look()
        self.stage = "start"

    def look(self) -> str:
        for path in sorted(self._run.journal.glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            for line in whole.splitlines():
                self._take(line)
        return self.stage

    def _take(self, line: bytes) -> None:
        if b'"stage' not in line:
            return
        event = json.loads(line)
        if event["type"] == "stage_started":
            self.stage = event["stage"]
        elif event["type"] == "stage_finished":
            self.stage = "between"
            self.done.add(event["stage"])


def aims(stages: list[str], most: int, dice: random.Random) -> list[str]:
    """Where a run shall be killed, in the line's order: nearly half while money is in the air, the
    rest spread over the other stages and over starts."""
    weights = [6 if stage == "generate" else 1 for stage in stages]
    drawn = sorted(dice.choices(stages, weights, k=most), key=stages.index)
    return ["start" if dice.random() < START_SHARE else stage for stage in drawn]


def kill_at_random(engine: Engine, progress: Progress, aim: str, dice: random.Random) -> str:
    """Wait for a random moment and kill. Where it fell; empty when the engine ended before."""
    progress.begin()
    if aim == "start":
        deadline = time.monotonic() + dice.uniform(0.0, 4.0)
        while engine.alive and time.monotonic() < deadline:
            time.sleep(0.005)
    elif aim == "generate":  # by progress: speed does not decide where it falls
        path, most = dice.choice(((engine.run.completions, 5), (engine.run.spend, 12)))
        target = lines_in(path) + dice.randrange(1, most)
        while engine.alive and lines_in(path) < target and aim not in progress.done:
            time.sleep(0.002)
            progress.look()
        time.sleep(dice.uniform(0.0, 0.05))
    else:
        while engine.alive and progress.look() != aim and aim not in progress.done:
            time.sleep(0.01)
        deadline = time.monotonic() + dice.uniform(0.0, STAGE_S)
        while engine.alive and progress.look() == aim and time.monotonic() < deadline:
            time.sleep(0.01)
    where = progress.look()
    if not engine.alive:
        return ""
    engine.kill()
    return where


def one_run(run: RunDir, dice: random.Random, most: int, stages: list[str]) -> Counter[str]:
    """Kill and resume until the run is done or has been killed `most` times. Returns where the
    kills fell. No process of a killed engine outlives it for long."""
    kills: Counter[str] = Counter()
    progress = Progress(run)
    orphans: list[psutil.Process] = []
    for aim in [*aims(stages, most, dice), ""]:
        engine = Engine(run)
        if aim and (where := kill_at_random(engine, progress, aim, dice)):
            kills[where] += 1
            orphans += engine.orphans
            continue
        code = engine.wait(600)
        assert code == 0, f"{run.path}: engine ended with {code}; see {run.output_log}"
        break
    psutil.wait_procs(orphans, ORPHANS_END_S)
    left = [one for one in orphans if one.is_running()]
    assert not left, f"children of killed engines that did not end: {left}"
    return kills


HEADER = (
    f"{'run':<9}{'kills':>6} {'prompts':>8} {'one outcome each':<30} {'booked $':>13} "
    f"{'billed $':>13} {'difference':>11} {'no id':>6} {'unproven $':>11}  killed in"
)


def rounds(folder: Path, total: int, seed: int, limit: int) -> Counter[str]:
    """Returns where the kills fell."""
    dice = random.Random(seed)
    books_of = ("--truth", str(folder / "truth.jsonl"), "--books", str(folder / "books.jsonl"))
    gateway = Gateway(folder, "--seed", str(seed), "--latency-scale", "4", *books_of)
    kills: Counter[str] = Counter()
    runs = unknown = 0
    worst = booked = billed = 0.0
    seen: set[str] = set()
    say(HEADER)
    try:
        while kills.total() < total:
            runs += 1
            run = new_run(run_config(gateway, limit, **WHOLE_LINE), folder, f"kill-{runs:03d}")
            most = min(total - kills.total(), dice.randrange(14, 22))
            mine = one_run(run, dice, most, list(STAGES))
            kills += mine
            bill = gateway.bill()
            books = check(run, bill, frozenset(seen))
            seen |= {g["id"] for g in bill["generations"]}
            assert run.eval.exists() and any(run.export.iterdir()), f"{run.path}: no drafter"
            outcomes = ", ".join(f"{n} {name}" for name, n in sorted(books.outcomes.items()))
            difference = books.spent_usd - books.billed_usd
            say(
                f"{run.run_id:<9}{mine.total():>6} {books.outcomes.total():>8} {outcomes:<30} "
                f"{books.spent_usd:>13.9f} {books.billed_usd:>13.9f} {difference:>11.1e} "
                f"{books.uncertain:>6} {books.uncertain_usd:>11.9f}  {places(mine)}"
            )
            assert abs(difference) < 1e-9, f"{run.path}: booked and billed differ"
            worst = max(worst, abs(difference))
            booked, billed = booked + books.spent_usd, billed + books.billed_usd
            unknown += books.uncertain
    finally:
        gateway.close()
    say(
        f"{kills.total()} kills in {runs} runs ({places(kills)}): one outcome a prompt, no torn "
        f"line, journal numbers rising, no child left; {unknown} requests without an id; booked "
        f"${booked:.9f}, billed ${billed:.9f}, largest difference of a run ${worst:.1e}"
    )
    return kills


def places(kills: Counter[str]) -> str:
    return ", ".join(
        f"{kills[name]} {name}" for name in ("start", *STAGES, "between") if kills[name]
    )


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, default=32, help="API prompts in a run")
    parser.add_argument("--keep", type=Path, help="folder for the runs; default: temporary")
    asked = parser.parse_args()
    if asked.keep:
        asked.keep.mkdir(parents=True, exist_ok=True)
        rounds(asked.keep, asked.rounds, asked.seed, asked.limit)
    else:
        with tempfile.TemporaryDirectory(prefix="eyas-kill-") as folder:
            rounds(Path(folder), asked.rounds, asked.seed, asked.limit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
