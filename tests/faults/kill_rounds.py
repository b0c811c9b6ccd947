"""kill -9 at random moments, resume, again: `python -m tests.faults.kill_rounds --rounds 100`.

One gateway lives through all of it, so that its bill is the truth. An engine is killed at a random
moment (while it starts, while requests are in flight, between stages) and started again on the same
run directory, until the run is done; then the books are checked and a new run begins, until there
were enough kills. Prints one line a run and one in the end; the first violation is an
AssertionError."""

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from core.store import RunDir
from tests.faults.rig import Engine, Gateway, check, lines_in, new_run, run_config


def kill_at_random(engine: Engine, dice: random.Random) -> bool:
    """Wait for a random moment and kill. False when the engine ended by itself before."""
    if dice.random() < 0.25:  # while it starts, or at any time at all
        deadline = time.monotonic() + dice.uniform(0.0, 4.0)
        while engine.alive and time.monotonic() < deadline:
            time.sleep(0.005)
    else:  # a moment defined by progress: the machine's speed does not decide where it falls
        path = dice.choice((engine.run.completions, engine.run.spend))
        target = lines_in(path) + dice.randrange(1, 12)
        while engine.alive and lines_in(path) < target:
            time.sleep(0.002)
        time.sleep(dice.uniform(0.0, 0.05))
    if not engine.alive:
        return False
    engine.kill()
    return True


def one_run(run: RunDir, dice: random.Random, most: int) -> int:
    """Kill and resume until the run is done or has been killed `most` times. Returns the kills."""
    kills = 0
    while True:
        engine = Engine(run)
        if kills < most and kill_at_random(engine, dice):
            kills += 1
            continue
        code = engine.wait()
        assert code == 0, f"{run.path}: engine ended with {code}; see {run.output_log}"
        return kills


def rounds(folder: Path, total: int, seed: int, limit: int) -> int:
    """Returns the number of kills done."""
    dice = random.Random(seed)
    gateway = Gateway(folder, "--seed", str(seed), "--latency-scale", "4")
    kills = runs = 0
    difference = 0.0
    seen: set[str] = set()
    try:
        while kills < total:
            runs += 1
            run = new_run(run_config(gateway, limit), folder, f"kill-{runs:03d}")
            mine = one_run(run, dice, min(total - kills, dice.randrange(3, 12)))
            kills += mine
            bill = gateway.bill()
            books = check(run, bill, frozenset(seen))
            seen |= {g["id"] for g in bill["generations"]}
            difference += books.spent_usd - books.billed_usd
            sys.stdout.write(
                f"{run.run_id}: {mine} kills, outcomes {dict(books.outcomes)}, "
                f"booked ${books.spent_usd:.6f}, billed ${books.billed_usd:.6f}, "
                f"{books.uncertain} uncertain (${books.uncertain_usd:.6f}, really "
                f"${books.unseen_usd:.6f})\n"
            )
            sys.stdout.flush()
    finally:
        gateway.close()
    sys.stdout.write(
        f"{kills} kills in {runs} runs: one outcome a prompt, no torn line, every known generation "
        f"booked as billed; booked above the bill for lack of an id: ${difference:.6f}\n"
    )
    return kills


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, default=48, help="API prompts in a run")
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
