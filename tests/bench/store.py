"""Embedded SQLite or files? `python -m tests.bench.store [--records N] [--seconds S] [--kills N]`

The same records (replies of 2,000 tokens, `tests.bench.records`) into the append-only JSONL that a
run writes (group commit, fsync at most 0.2 s late) and into SQLite (WAL, one writer thread with the
same group commit, synchronous NORMAL and FULL):

volume   bytes of a reply on disk, plain and packed, and what packing costs
append   1,000 replies/s offered for S seconds: how long until a reply is durable, what it costs
resume   a run with N finished prompts: what generate does before it can send (heads and books)
kill     a child is killed with -9 in the middle of that load: is everything there that it had been
         told is durable, and can the file be read?

A killed process leaves the kernel's cache behind, so `kill` shows what survives a crash of ours;
fsync, which is for the loss of power, shows in the latency. In WAL mode NORMAL does not sync at a
commit: its latency is that of an acknowledgement that power may still undo."""

import argparse
import asyncio
import os
import random
import select
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import msgspec

from core.generate.resume import recover
from core.schema import Rollout, SpendLine, pack_reply, reply_text
from core.store import Appender, RunDir, encode_line, read_jsonl
from tests.bench import meter, records

PER_S = 1_000
TICK_S = 0.005
COMMIT_S = 0.2
DISTINCT = 200
"""Texts that are cycled through: making one costs more than storing it."""
KINDS = ("lines", "sqlite-normal", "sqlite-full")
SCHEMA = """
create table if not exists replies(prompt_id text, attempt integer, outcome text, final integer,
    bill text, usage text, record blob, primary key(prompt_id, attempt)) without rowid;
create table if not exists spend(kind text, prompt_id text, attempt integer, backend text,
    provider text, generation_id text, reserve_usd real, cost_usd real, cap_usd real);
"""


class Store(Protocol):
    async def append(self, record: Rollout) -> None:
        """Returns when it is durable."""

    def close(self) -> None: ...


class Lines:
    def __init__(self, folder: Path) -> None:
        self._file = Appender(RunDir(folder).completions)

    async def append(self, record: Rollout) -> None:
        await self._file.append(record, durable=True)

    def close(self) -> None:
        self._file.close()


class Sqlite:
    """One writer thread; a transaction takes all that waits, at most every COMMIT_S."""

    def __init__(self, folder: Path, synchronous: str) -> None:
        self._path, self._synchronous = folder / "replies.sqlite", synchronous
        self._queue: list[tuple[Rollout, Future[None]]] = []
        self._condition = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    async def append(self, record: Rollout) -> None:
        done: Future[None] = Future()
        with self._condition:
            self._queue.append((record, done))
            self._condition.notify()
        await asyncio.wrap_future(done)

    def close(self) -> None:
        with self._condition:
            self._closing = True
            self._condition.notify()
        self._thread.join()

    def _run(self) -> None:
        base = connect(self._path, self._synchronous)
        last = 0.0
        while True:
            with self._condition:
                while not self._queue and not self._closing:
                    self._condition.wait()
            if not self._closing:
                time.sleep(max(0.0, last + COMMIT_S - time.monotonic()))
            with self._condition:
                batch, self._queue = self._queue, []
                closing = self._closing
            with base:
                base.executemany("insert into replies values(?,?,?,?,?,?,?)", map(row, batch))
            last = time.monotonic()
            for _, done in batch:
                done.set_result(None)
            if closing:
                base.close()
                return


def connect(path: Path, synchronous: str) -> sqlite3.Connection:
    base = sqlite3.connect(path)
    base.execute("pragma journal_mode=wal")
    base.execute(f"pragma synchronous={synchronous}")
    base.executescript(SCHEMA)
    return base


def row(item: tuple[Rollout, Any]) -> tuple[Any, ...]:
    one = item[0]
    usage = msgspec.json.encode(one.usage).decode()
    head = (one.prompt_id, one.attempt, one.outcome, one.final, one.bill, usage)
    return (*head, msgspec.json.encode(one))


def opened(kind: str, folder: Path) -> Store:
    return Lines(folder) if kind == "lines" else Sqlite(folder, kind.removeprefix("sqlite-"))


def numbered(streamed: bool) -> Iterator[Rollout]:
    """Records with ids of their own and texts that come round again."""
    texts = [records.rollout(i, streamed) for i in range(DISTINCT)]
    for number in range(1 << 40):
        yield msgspec.structs.replace(texts[number % DISTINCT], prompt_id=f"{number:064x}")


async def offer(
    store: Store,
    source: Iterator[Rollout],
    seconds: float,
    acknowledged: Callable[[str], None],
) -> list[float]:
    """PER_S records a second; seconds from each append to its acknowledgement."""
    waits: list[float] = []

    async def one(record: Rollout) -> None:
        before = time.monotonic()
        await store.append(record)
        waits.append(time.monotonic() - before)
        acknowledged(record.prompt_id)

    tasks: list[asyncio.Task[None]] = []
    start = time.monotonic()
    while (now := time.monotonic() - start) < seconds:
        due = int(now * PER_S) - len(tasks)
        tasks += [asyncio.create_task(one(next(source))) for _ in range(due)]
        await asyncio.sleep(TICK_S)
    await asyncio.gather(*tasks)
    return waits


def append_client(kind: str, folder: Path, seconds: float) -> None:
    store, source = opened(kind, folder), numbered(streamed=False)
    next(source)  # the texts are made before the clock starts
    before = meter.cpu_s()
    start = time.monotonic()
    waits = asyncio.run(offer(store, source, seconds, lambda prompt_id: None))
    took = time.monotonic() - start
    store.close()
    meter.report(
        {
            "per_s": len(waits) / took,
            "p50_ms": meter.percentile(waits, 0.5) * 1e3,
            "p99_ms": meter.percentile(waits, 0.99) * 1e3,
            "max_ms": max(waits) * 1e3,
            "cpu_ms": (meter.cpu_s() - before) / len(waits) * 1e3,
            "mb": sum(p.stat().st_size for p in folder.iterdir()) / 1e6,
        }
    )


def kill_client(kind: str, folder: Path) -> None:
    """Says each id as soon as it was told that the record is durable, until it is killed."""
    store = opened(kind, folder)
    source = numbered(streamed=False)
    asyncio.run(offer(store, source, 3_600.0, lambda prompt_id: print(prompt_id, flush=True)))


def volume_table() -> None:
    """`plain`: as text in the line; `packed`: as generate keeps a stream."""
    print(f"volume: {records.TOKENS:,} tokens a reply", flush=True)
    for streamed in (False, True):
        rows = [records.rollout(i, streamed) for i in range(50)]
        texts = [reply_text(r) or "" for r in rows]
        mean = sum(len(t.encode()) for t in texts) / len(texts)
        print(f"  {'streamed' if streamed else 'whole':<9} reply {mean:8.0f} bytes", flush=True)
        for name, fields in (("plain", plain), ("packed", packed)):
            start = time.process_time()
            lines = [
                encode_line(msgspec.structs.replace(r, **fields(t)))
                for r, t in zip(rows, texts, strict=True)
            ]
            wrote = (time.process_time() - start) / len(rows) * 1e3
            start = time.process_time()
            back = [reply_text(msgspec.json.decode(line, type=Rollout)) for line in lines]
            read = (time.process_time() - start) / len(rows) * 1e3
            assert back == texts
            size = sum(map(len, lines)) / len(lines)
            print(
                f"    {name:<6} line {size:8.0f} bytes  {size * 83_000 / 1e9:6.1f} GB for 83,000"
                f"  {wrote:.2f} ms CPU to write, {read:.2f} to read",
                flush=True,
            )


def plain(text: str) -> dict[str, Any]:
    return {"reply_raw": text, "reply_zlib": msgspec.UNSET}


def packed(text: str) -> dict[str, Any]:
    return {"reply_raw": None, "reply_zlib": pack_reply(text.encode())}


def started(*args: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "tests.bench.store", *args]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def append_table(seconds: float) -> None:
    print(f"append: {PER_S:,} replies/s offered for {seconds:.0f} s", flush=True)
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            out, _ = started("append", kind, folder, "--seconds", str(seconds)).communicate()
        got = msgspec.json.decode(out.splitlines()[-1])
        print(
            f"  {kind:<14} {got['per_s']:7.0f}/s  durable after p50 {got['p50_ms']:5.0f} ms, p99 "
            f"{got['p99_ms']:5.0f}, max {got['max_ms']:5.0f}  {got['cpu_ms']:.3f} ms CPU each"
            f"  {got['mb']:6.0f} MB",
            flush=True,
        )


def kill_table(rounds: int) -> None:
    print(f"kill -9 under {PER_S:,} replies/s, {rounds} rounds", flush=True)
    dice = random.Random(7)
    for kind in KINDS:
        said = kept = lost = 0
        for _ in range(rounds):
            with tempfile.TemporaryDirectory() as name:
                told = killed(kind, Path(name), dice.uniform(0.3, 2.0))
                there = ids_in(kind, Path(name))
                said, kept, lost = said + len(told), kept + len(there), lost + len(told - there)
        print(f"  {kind:<14} {said:6} said to be durable, {kept:6} found, {lost} lost", flush=True)


def killed(kind: str, folder: Path, after_s: float) -> set[str]:
    """Ids that the child had been told are durable. The clock starts at the first."""
    child = started("kill", kind, str(folder))
    assert child.stdout is not None
    descriptor = child.stdout.fileno()
    said = os.read(descriptor, 1 << 16)
    end = time.monotonic() + after_s
    while (left := end - time.monotonic()) > 0:
        if select.select([descriptor], [], [], left)[0]:
            said += os.read(descriptor, 1 << 16)
    child.kill()
    child.wait()
    while more := os.read(descriptor, 1 << 16):
        said += more
    child.stdout.close()
    return set(said[: said.rfind(b"\n")].decode().split())


def ids_in(kind: str, folder: Path) -> set[str]:
    if kind == "lines":
        run = RunDir(folder)
        Appender(run.completions).close()  # the next life sets a torn tail aside
        found = {r.prompt_id for r in read_jsonl(run.completions, Rollout) if reply_text(r)}
        assert recover(run).finished == found
        return found
    base = connect(folder / "replies.sqlite", "full")
    (sound,) = base.execute("pragma integrity_check").fetchone()
    assert sound == "ok", sound
    return {r[0] for r in base.execute("select prompt_id from replies")}


def resume_table(count: int) -> None:
    print(f"resume: {count:,} finished prompts", flush=True)
    for streamed in (False, True):
        with tempfile.TemporaryDirectory() as name:
            run = RunDir(Path(name))
            write_run(run, count, streamed)
            os.sync()  # a run that is resumed was not written a second ago
            size = run.completions.stat().st_size / 1e6
            what = "streamed" if streamed else "whole"
            before, start = meter.cpu_s(), time.monotonic()
            Appender(run.completions).close()  # what generate does: open, read
            found = recover(run)
            took, cpu = time.monotonic() - start, meter.cpu_s() - before
            assert len(found.finished) == count and not found.open
            print(
                f"  lines ({what:<8}) {took:6.2f} s  {cpu:5.2f} s CPU  {size:6.0f} MB"
                f"  books ${found.spent_usd:.2f}",
                flush=True,
            )
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "replies.sqlite"
        fill_sqlite(path, count)
        start = time.monotonic()
        base = connect(path, "full")
        heads = base.execute(
            "select prompt_id, attempt, outcome, final, bill, usage from replies"
        ).fetchall()
        books = base.execute("select * from spend").fetchall()
        took, size = time.monotonic() - start, path.stat().st_size / 1e6
        assert len(heads) == count and len(books) == 2 * count
        print(f"  sqlite (whole, rows alone) {took:6.2f} s  {size:14.0f} MB", flush=True)


def write_run(run: RunDir, count: int, streamed: bool) -> None:
    texts = [encode_line(records.rollout(i, streamed)) for i in range(DISTINCT)]
    with run.completions.open("wb") as replies, run.spend.open("wb") as spend:
        for number in range(count):
            was, now = f"{number % DISTINCT:064x}".encode(), f"{number:064x}".encode()
            replies.write(texts[number % DISTINCT].replace(was, now, 1))
            for line in records.spend_lines(number, streamed):
                spend.write(encode_line(line))


def fill_sqlite(path: Path, count: int) -> None:
    base, source = connect(path, "off"), numbered(streamed=False)
    fields = ("kind", "prompt_id", "attempt", "backend", "provider", "generation_id")
    fields += ("reserve_usd", "cost_usd", "cap_usd")

    def spent(line: SpendLine) -> tuple[Any, ...]:
        return tuple(getattr(line, name) for name in fields)

    with base:
        for number in range(count):
            base.execute("insert into replies values(?,?,?,?,?,?,?)", row((next(source), None)))
            for line in records.spend_lines(number, streamed=False):
                base.execute("insert into spend values(?,?,?,?,?,?,?,?,?)", spent(line))
    base.execute("pragma wal_checkpoint(truncate)")
    base.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="?", choices=("volume", "append", "resume", "kill"))
    parser.add_argument("kind", nargs="?", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("folder", nargs="?", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--kills", type=int, default=5)
    options = parser.parse_args()
    if options.folder is not None:
        if options.part == "append":
            append_client(options.kind, options.folder, options.seconds)
        else:
            kill_client(options.kind, options.folder)
        return
    if options.part in (None, "volume"):
        volume_table()
    if options.part in (None, "append"):
        append_table(options.seconds)
    if options.part in (None, "resume"):
        resume_table(options.records)
    if options.part in (None, "kill"):
        kill_table(options.kills)


if __name__ == "__main__":
    main()
