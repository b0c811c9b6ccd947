"""A disk that fills up at a random moment: `python -m tests.faults.disk_rounds --rounds 24`.

Runs inside a mount namespace of its own (`unshare -rm`), a gateway that replays beside it. Each
round is a run on a small file system: one of a random size, one that something else fills up after
a random number of replies, or one that runs out of inodes, so that the write that fails is any of
the engine's. Then there is space again, and the run is resumed. Asserted: the engine ends by
itself, halted and saying why (or refuses to start); no file ends in a partial line; every reply
that the gateway had sent whole is on disk in the end; exactly one outcome each; books and bill are
equal. Prints a row a round; the first violation is an AssertionError."""

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from core.errors import EXIT_DONE, EXIT_FAILED, EXIT_HALTED
from core.store import RunDir, read_status
from tests.faults.kill_streams import API, config_of, on_disk, replaying, say, sent_whole
from tests.faults.rig import Engine, Gateway, check, lines_in, new_run

LARGE = "64m"
INODES = 10_000
KINDS = ("small", "filled", "inodes")
PROMPTS = 200
IN_FLIGHT = 12
RESERVE_BYTES = IN_FLIGHT * (64 << 10)


def mount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)


class Round(msgspec.Struct):
    """`partial`: files that ended in a torn line. `at_full`: replies on disk when it was full."""

    kind: str
    size: str
    code: int = 0
    reason: str = ""
    at_full: int = 0
    kept: int = 0
    partial: int = 0
    difference: float = 0.0


def torn(run: RunDir) -> list[str]:
    """Files of paid work or of events that end in a partial line or hold an unreadable one."""
    found = []
    for path in (run.completions, run.spend, *run.journal.glob("*.jsonl")):
        data = path.read_bytes() if path.exists() else b""
        whole = not data or data.endswith(b"\n")
        if not whole or not all(_is_object(line) for line in data.splitlines()):
            found.append(path.name)
    return found


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def fill(folder: Path, leave_bytes: int) -> Path:
    """Take all space but so much, as another program would."""
    filler = folder / "filler"
    zeros = bytes(1 << 16)
    with filler.open("wb", buffering=0) as file:
        with contextlib.suppress(OSError):
            while file.write(zeros):
                pass
        file.truncate(max(0, file.tell() - leave_bytes))
    return filler


def one_round(
    gateway: Gateway, folder: Path, dice: random.Random, number: int, seen: set[str]
) -> Round:
    disk = folder / f"disk-{number:02d}"
    disk.mkdir()
    kind = KINDS[number % len(KINDS)]
    mount(disk, f"size={LARGE},nr_inodes={INODES}")
    run = new_run(config_of(gateway.address, PROMPTS, IN_FLIGHT), disk, f"disk-{number:02d}")
    made = Round(kind, LARGE)
    now = os.statvfs(disk)
    if kind == "small":
        used = (now.f_blocks - now.f_bfree) * now.f_frsize
        more = dice.randrange(30, 260)
        mount(disk, f"remount,size={(used + RESERVE_BYTES >> 10) + more}k")
        made.size = f"{more} kB left"
    if kind == "inodes":
        more = dice.randrange(6, 14)
        mount(disk, f"remount,nr_inodes={INODES - now.f_ffree + more}")
        made.size = f"{more} inodes left"
    since = time.time()
    engine = Engine(run)
    filler = None
    if kind == "filled":
        engine.until_replies(dice.randrange(1, PROMPTS))
        left = dice.choice((0, 0, dice.randrange(40_000)))
        filler = fill(disk, left)
        made.size = f"{left} bytes left"
    made.code = engine.wait()
    status = read_status(run)
    made.reason = status.reason if status and made.code != EXIT_FAILED else said(run)
    made.at_full = lines_in(run.completions)
    made.partial = len(torn(run))
    assert made.code in (EXIT_DONE, EXIT_FAILED, EXIT_HALTED), (made, tail(run))
    assert "Traceback" not in tail(run), (made, tail(run))
    if filler is not None:
        filler.unlink()
    mount(disk, f"remount,size={LARGE},nr_inodes={INODES}")
    code = Engine(run).wait()
    assert code == EXIT_DONE, (made, code, tail(run))
    bill = gateway.bill()
    books = check(run, bill, frozenset(seen))
    seen |= {g["id"] for g in bill["generations"]}
    made.difference = books.spent_usd - books.billed_usd
    assert abs(made.difference) < 1e-9, made
    whole = {g for g in sent_whole(gateway, since) if g.startswith(API)}
    lost = whole - on_disk(run).replies  # a local one may have been aborted, which sends a rest
    assert not lost, f"{made}: sent by the gateway, not on disk: {lost}"
    made.kept = len(whole)
    subprocess.run(["umount", str(disk)], check=True)
    return made


def said(run: RunDir) -> str:
    """What the engine said on its way out."""
    lines = [line for line in tail(run).splitlines() if line.startswith("eyas:")]
    return lines[-1].replace(str(run.path), "RUN") if lines else ""


def tail(run: RunDir) -> str:
    return run.output_log.read_text("utf-8", "replace")[-1_500:] if run.output_log.exists() else ""


HEADER = (
    f"{'round':>5} {'kind':<7} {'disk':<16} {'exit':>4} {'on disk then':>12} {'torn':>5} "
    f"{'sent whole, kept':>17} {'difference':>11}  state"
)


def rounds(folder: Path, total: int, seed: int, show: Callable[[str], None] = say) -> list[Round]:
    dice = random.Random(seed)
    gateway = replaying(folder, PROMPTS, "--tokens-per-s", "300", "--seed", str(seed))
    seen: set[str] = set()
    made = []
    show(HEADER)
    try:
        for number in range(total):
            one = one_round(gateway, folder, dice, number, seen)
            made.append(one)
            show(
                f"{number + 1:>5} {one.kind:<7} {one.size:<16} {one.code:>4} {one.at_full:>12} "
                f"{one.partial:>5} {one.kept:>17} {one.difference:>11.0e}  {one.reason[:90]}"
            )
    finally:
        gateway.close()
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if not asked.inside:
        command = ["unshare", "-rm", sys.executable, "-m", "tests.faults.disk_rounds", "--inside"]
        os.execvp(command[0], [*command, *sys.argv[1:]])
    with tempfile.TemporaryDirectory(prefix="eyas-disk-", ignore_cleanup_errors=True) as folder:
        os.environ["XDG_RUNTIME_DIR"] = folder  # spools of answers go there, not to the user's own
        made = rounds(Path(folder), asked.rounds, asked.seed)
    halted = [r for r in made if r.code == EXIT_HALTED]
    say(
        f"{len(made)} disks, {len(halted)} of them full in mid-run: "
        f"{sum(r.at_full for r in halted)} replies on disk then, {sum(r.kept for r in made)} sent "
        "whole in all, none lost, none asked again, no torn line; books equal the bill"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
