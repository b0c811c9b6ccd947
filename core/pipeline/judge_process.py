"""The judging process, seen from both ends: jobs go in through its stdin, verdicts come out of its
stdout, many on their way at once.

Promises: answers come in the order of the questions; a job that cannot be packed or judged there is
answered by None, and whoever asked judges it himself; the process ends when its stdin does, so that
a killed engine leaves none behind. Knows frames and jobs, nothing of what follows from a verdict.

    frame = length (8 bytes, little-endian) + MessagePack
    first frame: Config; then (StopOffsets, [Job, ...]) each answered by [Judged | None, ...]
"""

import asyncio
import contextlib
import fcntl
import os
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
"""Without one answer: a frame of replies of 10 MB each takes a tenth of it. A process that is
stopped or starved would otherwise keep every reply from the disk, and a halt from its end."""
CLOSE_S = 5.0
JOBS_A_FRAME = 8
"""Answers of a frame come at once, and the loop pays for them at once: 0.1 ms each."""
MOST_ON_WAY = 256
"""Jobs that were sent and not answered: 60 ms of judging, more than a step of a busy loop. The rest
waits unpacked, and is judged by what has been learned until then."""
PIPE_BYTES = 1 << 20
LENGTH = struct.Struct("<Q")
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


Answer = asyncio.Future[Judged | None]
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
        self._unsent: deque[tuple[Job, Answer]] = deque()
        self._on_way: deque[Answer] = deque()
        self._sending = False
        self._deadline: asyncio.TimerHandle | None = None
        self._late = self._closing = self._gone = False

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
            limit=PIPE_BYTES,
        )
        self._listening = asyncio.create_task(self._listen(self._process))
        _widen(self._process)
        self._write(_frame(self._config))

    async def judge(self, job: Job) -> Judged | None:
        """None: not judged here."""
        if self._gone:
            return None
        loop = asyncio.get_running_loop()
        answer: Answer = loop.create_future()
        self._unsent.append((job, answer))
        if not self._sending:
            self._sending = True
            loop.call_soon(self._send)
        return await answer

    def _send(self) -> None:
        """What this step of the loop has brought together, as far as there is room on the way."""
        self._sending = False
        packed: list[bytes] = []
        while self._unsent and len(self._on_way) < MOST_ON_WAY:
            job, answer = self._unsent.popleft()
            if answer.done():  # its waiter was cancelled
                continue
            try:
                packed.append(_pack(job))
            except UNPACKABLE:
                answer.set_result(None)
            else:
                self._on_way.append(answer)
        parts = range(0, len(packed), JOBS_A_FRAME)
        self._write(
            b"".join(_frame((self._offsets, packed[at : at + JOBS_A_FRAME])) for at in parts)
        )
        if self._deadline is None:
            self._wait_on()

    def _write(self, data: bytes) -> None:
        if not self._gone and self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(data)

    def _wait_on(self) -> None:
        """The clock starts again with every answer, while somebody waits for one."""
        if self._deadline is not None:
            self._deadline.cancel()
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(MOST_S, self._give_up) if self._on_way else None

    def _give_up(self) -> None:
        self._late = True
        self._kill()

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        """Until the process ends, or says what nobody can read: then nobody waits for it."""
        assert process.stdout is not None
        read, why = process.stdout.readexactly, "died"
        try:
            while True:
                (length,) = LENGTH.unpack(await read(LENGTH.size))
                self._take(_answers.decode(await read(length)))
        except (asyncio.IncompleteReadError, OSError):
            pass  # its end
        except (msgspec.MsgspecError, IndexError, MemoryError) as error:
            why = f"answered what cannot be read ({type(error).__name__})"
        finally:
            self._kill()
            self._end(why)

    def _take(self, answers: list[bytes | None]) -> None:
        judged = [None if packed is None else _judged.decode(packed) for packed in answers]
        for one in judged:
            _answer(self._on_way.popleft(), one)
        self._wait_on()
        self._send()

    def _end(self, why: str) -> None:
        self._gone = True
        waiting = [*self._on_way, *(answer for _, answer in self._unsent)]
        self._on_way.clear()
        self._unsent.clear()
        self._wait_on()
        if not self._closing or not all(answer.done() for answer in waiting):
            silent = f"gave no answer for {MOST_S:.0f} s"
            self._lost(f"the judging process {silent if self._late else why}")
        for answer in waiting:
            _answer(answer, None)

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
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
            pass  # killed below
        finally:
            self._kill()
        await process.wait()
        await self._listening


def _widen(process: asyncio.subprocess.Process) -> None:
    """A pipe of a megabyte (64 kB are 16 replies), where the system has one so large."""
    size = getattr(fcntl, "F_SETPIPE_SZ", None)  # Linux
    if size is not None and process.stdin is not None:
        with contextlib.suppress(OSError):
            fcntl.fcntl(process.stdin.transport.get_extra_info("pipe"), size, PIPE_BYTES)


def _answer(answer: Answer, judged: Judged | None) -> None:
    if not answer.done():  # its waiter was cancelled
        answer.set_result(judged)


def main(argv: list[str]) -> int:
    """The process's end, `python -m core judge`: until its stdin ends."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints is not an answer
    source = sys.stdin.buffer
    first = _read(source)
    if first is None:
        return 0
    desk = Desk(renderer_of(msgspec.msgpack.decode(first, type=Config)))
    try:
        while (frame := _read(source)) is not None:
            offsets, jobs = _questions.decode(frame)
            out.write(_frame([_judge(desk, packed, offsets) for packed in jobs]))
            out.flush()
    except BrokenPipeError:
        os._exit(0)  # the engine was killed; what is in the buffer has nowhere to go
    return 0


def _judge(desk: Desk, packed: bytes, offsets: StopOffsets) -> bytes | None:
    """None for whatever goes wrong: the engine judges it again and meets the same fault itself. A
    verdict with lone surrogates is no fault, only none that can be packed."""
    try:
        judged = desk.judge(_job.decode(packed), offsets)
    except Exception as error:
        sys.stderr.write(f"judge: {type(error).__name__}; the engine judges this reply itself\n")
        return None
    try:
        return _pack(judged)
    except UNPACKABLE:
        return None


def _read(source: BinaryIO) -> bytes | None:
    head = source.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    body = source.read(length)
    return body if len(body) == length else None
