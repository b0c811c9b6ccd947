"""The judging process, seen from both ends: jobs go in through its stdin, verdicts come out of its
stdout, many on their way at once.

Promises: answers come in the order of the questions; a job that cannot be packed or judged there is
answered by None, and whoever asked judges it himself; the process ends when its stdin does, so that
a killed engine leaves none behind. Knows frames and jobs, nothing of what follows from a verdict.

    frame = length (4 bytes, little-endian) + MessagePack
    first frame: Config; then (StopOffsets, [Job, ...]) each answered by [Judged | None, ...]
"""

import asyncio
import contextlib
import fcntl
import os
import signal
import struct
import sys
from collections import deque
from collections.abc import Callable
from typing import Any, BinaryIO, NamedTuple

import msgspec

from core.audit.live import Inspector
from core.audit.tripwires import Observation
from core.config import Config
from core.halting import python_command
from core.reconstruct import StopOffsets, judge
from core.render.base import Renderer
from core.render.source import renderer_of
from core.schema import Prompt, Rollout, Sample

MOST_S = 60.0
"""Without one answer: 32 replies of 10 MB each take a third of it. A process that is stopped or
starved would otherwise keep every reply from the disk, and a halt from its end."""
CLOSE_S = 5.0
JOBS_A_FRAME = 8
"""Answers of a frame come at once, and the loop pays for them at once: 0.1 ms each."""
READ_BYTES = 1 << 20
LENGTH = struct.Struct("<I")
UNPACKABLE = (ValueError, TypeError, OverflowError, RecursionError, msgspec.MsgspecError)
"""Lone surrogates and integers of more than 64 bits, which MessagePack does not know."""


class Job(NamedTuple):
    """`ids`: the prompt's, as rendered."""

    rollout: Rollout
    prompt: Prompt
    ids: list[int]


class Judged(NamedTuple):
    """`sample` without its ids and segments: a thousand numbers a reply that nobody in the engine
    reads, and that the reconstruct stage makes again."""

    sample: Sample
    seen: Observation


class Desk:
    """Judges one reply, then looks at the sample as the audit will. Pure but for its caches."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._inspector = Inspector(renderer)

    def judge(self, job: Job, offsets: StopOffsets) -> Judged:
        sample = judge(job.rollout, job.prompt, self._renderer, offsets, job.ids)
        seen = self._inspector.inspect(sample, job.prompt)
        return Judged(msgspec.structs.replace(sample, token_ids=[], segments=[]), seen)


_pack = msgspec.msgpack.Encoder().encode
_job = msgspec.msgpack.Decoder(Job)
_judged = msgspec.msgpack.Decoder(Judged)
_questions = msgspec.msgpack.Decoder(tuple[StopOffsets, list[bytes]])
_answers = msgspec.msgpack.Decoder(list[bytes | None])


def _frame(content: Any) -> bytes:
    packed = _pack(content)
    return LENGTH.pack(len(packed)) + packed


class JudgeProcess:
    """One process and the jobs that it has. Made, started and closed in one loop."""

    def __init__(self, config: Config, offsets: StopOffsets, lost: Callable[[str], None]) -> None:
        """`offsets`: as learned so far; a job is judged by what they are when it is sent. `lost` is
        told, once, why there is no process any more."""
        self._config = config
        self._offsets = offsets
        self._lost = lost
        self._process: asyncio.subprocess.Process | None = None
        self._listening: asyncio.Task[None] | None = None
        self._unsent: list[bytes] = []
        self._waiting: deque[asyncio.Future[Judged | None]] = deque()
        self._deadline: asyncio.TimerHandle | None = None
        self._late = self._closing = False
        self.gone = False

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        """Before the first request, so that the process is there when replies come. Raises
        OSError."""
        self._process = await asyncio.create_subprocess_exec(
            *python_command("core", "judge"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=READ_BYTES,
        )
        _widen(self._process)
        self._write(_frame(self._config))
        self._listening = asyncio.create_task(self._listen())

    async def judge(self, job: Job) -> Judged | None:
        """None: not judged here."""
        if self.gone:
            return None
        try:
            packed = _pack(job)
        except UNPACKABLE:
            return None
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Judged | None] = loop.create_future()
        if not self._unsent:
            loop.call_soon(self._send)
        self._unsent.append(packed)
        self._waiting.append(future)
        return await future

    def _send(self) -> None:
        """What this step of the loop has brought together."""
        jobs, self._unsent = self._unsent, []
        parts = range(0, len(jobs), JOBS_A_FRAME)
        self._write(b"".join(_frame((self._offsets, jobs[at : at + JOBS_A_FRAME])) for at in parts))
        if self._deadline is None:
            self._wait_on()

    def _write(self, data: bytes) -> None:
        if not self.gone and self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(data)

    def _wait_on(self) -> None:
        """The clock starts again with every answer, while somebody waits for one."""
        if self._deadline is not None:
            self._deadline.cancel()
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(MOST_S, self._give_up) if self._waiting else None

    def _give_up(self) -> None:
        self._late = True
        self._kill()

    async def _listen(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        read = self._process.stdout.readexactly
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                (length,) = LENGTH.unpack(await read(LENGTH.size))
                self._take(_answers.decode(await read(length)))
        self.gone = True
        if self._waiting or not self._closing:
            silent = f"the judging process gave no answer for {MOST_S:.0f} s"
            self._lost(silent if self._late else "the judging process died")
        self._unsent.clear()
        waiting, self._waiting = self._waiting, deque()
        for future in waiting:
            _answer(future, None)
        self._wait_on()

    def _take(self, answers: list[bytes | None]) -> None:
        for packed in answers:
            _answer(self._waiting.popleft(), packed)
        self._wait_on()

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def close(self) -> None:
        """When nobody waits any more."""
        process = self._process
        if process is None or self._listening is None:
            return
        self._closing = True
        if process.stdin is not None:
            process.stdin.close()
        try:
            async with asyncio.timeout(CLOSE_S):
                await process.wait()
        except TimeoutError:
            self._kill()
            await process.wait()
        await self._listening


def _widen(process: asyncio.subprocess.Process) -> None:
    """A pipe of a megabyte (64 kB are 16 replies), where the system has one so large."""
    assert process.stdin is not None
    pipe = process.stdin.transport.get_extra_info("pipe")
    with contextlib.suppress(OSError):
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, READ_BYTES)


def _answer(future: asyncio.Future[Judged | None], packed: bytes | None) -> None:
    if not future.done():  # its waiter was cancelled
        future.set_result(None if packed is None else _judged.decode(packed))


def main(argv: list[str]) -> int:
    """The process's end, `python -m core judge`: until its stdin ends."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):  # they are the engine's to hear
        signal.signal(number, signal.SIG_IGN)
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints is not an answer
    source = sys.stdin.buffer
    first = _read(source)
    if first is None:
        return 0
    desk = Desk(renderer_of(msgspec.msgpack.decode(first, type=Config)))
    with contextlib.suppress(BrokenPipeError):
        while (frame := _read(source)) is not None:
            offsets, jobs = _questions.decode(frame)
            out.write(_frame([_judge(desk, packed, offsets) for packed in jobs]))
            out.flush()
        out.close()
    return 0


def _judge(desk: Desk, packed: bytes, offsets: StopOffsets) -> bytes | None:
    """None for whatever goes wrong: the engine judges it again and meets the same fault itself."""
    try:
        return _pack(desk.judge(_job.decode(packed), offsets))
    except Exception:
        return None


def _read(source: BinaryIO) -> bytes | None:
    head = source.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    body = source.read(length)
    return body if len(body) == length else None
