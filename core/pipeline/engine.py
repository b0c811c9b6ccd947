"""The engine: one process, one run, stages in order, and everything that may stop them.

Promises: a halt from any side (socket, HALT file within 200 ms, SIGTERM, tripwire, full disk)
closes the gate in the same tick; the run ends in exactly one of done, halted, tripped, failed; the
last line of output.log is a `done` record. Knows when stages run, not what they do. Never loads
torch."""

import asyncio
import contextlib
import os
import pwd
import signal
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import msgspec

from core import events as ev
from core.config import Config, config_hash
from core.control import CommandRequest, ControlServer, Peer
from core.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_HALTED,
    EXIT_TRIPWIRE,
    ControlError,
    DiskFull,
    EyasError,
    Halted,
    StoreError,
    Tripped,
    UsageError,
)
from core.gpu import HostSampler
from core.journal import Journal
from core.pipeline.child import StageChild
from core.pipeline.generating import GenerateStage
from core.pipeline.heartbeat import status_of
from core.pipeline.setting import read_prompts, write_prompts
from core.pipeline.stages import (
    BY_NAME,
    Markers,
    Stage,
    clear_outputs,
    refuse_what_is_missing,
    selected,
    stage_named,
)
from core.pipeline.summary import summarise
from core.pipeline.watch import Halt, Watch
from core.render.source import renderer_of
from core.render.tokenizer import TokenizerLike
from core.schema import Prompt
from core.store import Reserve, RunDir, Status, make_manifest, write_manifest, write_status
from core.store.linefile import full_disk_named
from core.store.rundir import is_gone, read_halt_file

HALT_POLL_S = 0.1
HEARTBEAT_S = 1.0
RESERVE_BYTES_IN_FLIGHT = 64 << 10
"""Set aside for each request that may be in flight: a long reply as a stream of SSE events."""
MAX_RESERVE_BYTES = 256 << 20


class Stoppable(Protocol):
    """Whatever runs now. `halt` must close its gate before it returns."""

    def halt(self, source: str, by: str) -> None: ...
    def drain(self) -> None: ...
    def sever(self) -> None: ...


class Options(NamedTuple):
    """`only`: one stage, again, whatever its marker says. `announce` is told once the run is up."""

    argv: list[str]
    only: str = ""
    fresh_prompts: bool = False
    announce: Callable[[dict[str, Any]], None] = lambda record: None
    abandon: bool = False


class Engine:
    """One life of one run."""

    def __init__(self, run: RunDir, config: Config, options: Options) -> None:
        self.run = run
        self.config = config
        self.options = options
        self.started_at = time.time()
        self.manifest = make_manifest(run, config, options.argv)
        self.markers = Markers(run, config)
        in_flight = config.generate.max_in_flight
        self.reserve = Reserve(
            run.reserve, min(MAX_RESERVE_BYTES, in_flight * RESERVE_BYTES_IN_FLIGHT)
        )
        self.journal = Journal(run, self.reserve)
        self.control = ControlServer(run, self._command, lambda: self.journal.view)
        self.sampler = HostSampler(run.path)
        self.work: Stoppable | None = None
        self.stopping: EyasError | None = None
        self.draining = False
        self.exit_code: int | None = None
        self._halted_by = ("", "")
        self._status_lock = threading.Lock()
        self._background: list[asyncio.Task[None]] = []
        self._loop = asyncio.get_running_loop()

    async def main(self) -> int:
        """Run to the end; returns the exit code. A start-up failure is raised, after cleaning
        up."""
        try:
            await self.control.start()
            self.journal.subscribe(self.control.publish)
            write_manifest(self.run, self.manifest)
            for number in (signal.SIGTERM, signal.SIGINT):
                name = signal.Signals(number).name
                self._loop.add_signal_handler(number, self.halt, "signal", name, "")
            await asyncio.to_thread(refuse_what_is_missing, self.config, self._chosen())
            renderer = await asyncio.to_thread(renderer_of, self.config)
            self._pin_tokenizer(renderer.tokenizer)  # a refused start writes no prompts
            prompts = await asyncio.to_thread(self._prompts)
            self._announce(len(prompts))
            self.sampler.start()
            self._watch = Watch(self.run, self.config, self.journal.emit, self._asked_to_halt)
            for work in (self._watch_halt_file(), self._heartbeat()):
                self._background.append(task := asyncio.create_task(work))
                task.add_done_callback(self._background_ended)
            self._generate = GenerateStage(
                self.run,
                self.config,
                prompts,
                renderer,
                self._watch,
                self._relay,
                self.reserve,
                self._asked_to_halt,
            )
            state, code, reason = await self._carry_out()
        except BaseException as e:
            code = e.exit_code if isinstance(e, EyasError) else EXIT_FAILED
            await self._close("failed", code, f"start-up: {e}")
            raise
        await self._close(state, code, reason)
        return code

    def _pin_tokenizer(self, tokenizer: TokenizerLike) -> None:
        """Ids of one tokenizer never meet those of another in one run."""
        where, sha256 = self.config.target.tokenizer or "embedded", tokenizer.sha256
        earlier = self.manifest.tokenizer_sha256
        if earlier and earlier != sha256:
            raise UsageError(
                f"{where}: not the tokenizer that this run began with "
                f"({sha256[:12]}, was {earlier[:12]}); put it back, or start a new run"
            )
        self.manifest = msgspec.structs.replace(
            self.manifest,
            tokenizer=where,
            tokenizer_sha256=sha256,
            tokenizer_files=tokenizer.hashes,
        )
        write_manifest(self.run, self.manifest)

    def _prompts(self) -> list[Prompt]:
        if self.options.fresh_prompts or not self.run.prompts.exists():
            return write_prompts(self.run, self.config)
        return read_prompts(self.run)

    def _announce(self, prompts: int) -> None:
        names = [s.name for s in self._chosen()]
        self.journal.emit(
            ev.RunStarted(
                run_id=self.run.run_id,
                argv=self.options.argv,
                config_hash=config_hash(self.config),
                budget_usd=self.config.run.budget_usd,
                stages=names,
                prompts=prompts,
                resumed=self.manifest.lives > 1,
            )
        )
        if not (self.stopping or self.draining):
            self._state("starting")
        self._write_status(self._status())
        self.options.announce(
            {
                "run_id": self.run.run_id,
                "path": str(self.run.path.resolve()),
                "pid": os.getpid(),
                "socket": str(self.control.path),
                "output": str(self.run.output_log.resolve()),
                "api_version": ev.API_VERSION,
                "prompts": prompts,
                "stages": names,
            }
        )

    def _chosen(self) -> list[Stage]:
        return [stage_named(self.options.only)] if self.options.only else selected(self.config)

    async def _carry_out(self) -> tuple[ev.State, int, str]:
        try:
            if not (self.stopping or self.draining):  # asked for during start-up
                self._state("running")
            for stage in self._chosen():
                await self._stage(stage)
            summary = await asyncio.to_thread(summarise, self.run, self.config, self.markers.done)
            self.journal.emit(summary)
            only = self.options.only
            what = "what was pending is given up" if self.options.abandon else f"stage {only} alone"
            return "done", EXIT_DONE, what if only else ""
        except Tripped as e:
            self._account(str(e))
            return "tripped", EXIT_TRIPWIRE, str(e)
        except Halted as e:
            self._account(str(e))
            return "halted", EXIT_HALTED, str(e)
        except EyasError as e:
            return "failed", e.exit_code, str(e)
        except Exception as e:
            traceback.print_exc()
            reason = f"internal error: {type(e).__name__}: {e}; see output.log"
            self.journal.emit(ev.Log(level="error", message=reason))
            return "failed", EXIT_FAILED, reason

    async def _stage(self, stage: Stage) -> None:
        if self.stopping:
            raise self.stopping
        if self.draining:
            raise Halted("drained")
        if self.options.only:
            await asyncio.to_thread(clear_outputs, self.run, stage)
        elif marker := await asyncio.to_thread(self.markers.finished, stage):
            self.journal.emit(ev.StageStarted(stage=stage.name))
            summary = {**marker.summary, "skipped": "unchanged since it finished"}
            self.journal.emit(
                ev.StageFinished(stage=stage.name, seconds=marker.seconds, summary=summary)
            )
            return
        self.journal.emit(ev.StageStarted(stage=stage.name))
        started = time.monotonic()
        try:
            with full_disk_named():
                summary = await self._perform(stage)
                took_s = time.monotonic() - started
                if not summary.get("pending"):
                    marked = (stage, time.time(), took_s, summary)
                    await asyncio.to_thread(self.markers.finish, *marked)
        except Halted as e:
            raise self.stopping or e from e
        except DiskFull as e:
            raise Halted(f"disk_full: {e}") from e
        except EyasError as e:
            self.journal.emit(ev.StageFailed(stage=stage.name, error=str(e)))
            raise
        finally:
            self.work = None
        self.journal.emit(ev.StageFinished(stage=stage.name, seconds=took_s, summary=summary))

    async def _perform(self, stage: Stage) -> dict[str, Any]:
        if stage is BY_NAME["generate"]:
            self.work = self._generate
            return await self._generate.perform(self.options.abandon)
        self.work = child = StageChild(self.run, stage, self._relay)
        return await child.run()

    def _relay(self, event: ev.Event) -> None:
        self.journal.emit(event)
        self._watch.event(event)

    def halt(self, source: str, by: str, reason: str = "", error: EyasError | None = None) -> None:
        """Stop now. The first call counts; what runs closes its gate before this returns."""
        if self.stopping is not None:
            return
        known = "" if source == "command" else source  # then whose it was says it all
        words = ", ".join(w for w in (known, by, reason) if w)
        self.stopping = error or Halted(f"halted ({words})")
        if self.work is not None:
            self.work.halt(source, by)
        self._halted_by = (source, by)
        self._state("halting", words)
        self._loop.run_in_executor(None, self.journal.flush)

    def _asked_to_halt(self, halt: Halt) -> None:
        self.halt(halt.source, halt.by, halt.reason, halt.error)

    def _sever(self, source: str, by: str, reason: str) -> None:
        self.halt(source, by, reason)
        if self.work is not None:
            self.work.sever()

    def _account(self, reason: str) -> None:
        """Every halt leaves an account; generate writes its own, with what was cancelled and
        saved."""
        view = self.journal.view
        if view.halt is not None and view.halt.complete and view.halt.ts >= self.started_at:
            return
        source, by = self._halted_by
        self.journal.emit(
            ev.Halt(
                source=source or reason,
                by=by,
                spent_usd=view.stats.spent_usd if view.stats else 0.0,
                uncertain_usd=view.stats.uncertain_usd if view.stats else 0.0,
                checkpoint_step=view.train.checkpoint_step if view.train else None,
                complete=True,
            )
        )

    def _command(self, request: CommandRequest, peer: Peer) -> str:
        who = user_name(peer.uid)
        by = f"{who} ({peer.client.removeprefix(f'{who}/') or 'unnamed client'})"
        match request.name:
            case "halt":
                self.halt("command", by, request.reason)
            case "sever":
                self._sever("command", by, request.reason)
            case "drain":
                self._drain(request.reason)
            case "resume":
                raise ControlError(
                    f"resume: this engine is {self.journal.view.state}; "
                    f"`eyas resume {self.run.run_id}` starts the next one when it has stopped"
                )
        self.journal.emit(ev.Command(name=request.name, by=by, uid=peer.uid, reason=request.reason))
        return self.journal.view.state

    def _drain(self, reason: str) -> None:
        if self.draining or self.stopping:
            return
        self.draining = True
        if self.work is not None:
            self.work.drain()
        self._state("draining", reason)

    def _state(self, state: ev.State, reason: str = "") -> None:
        self.journal.emit(ev.StateChanged(state=state, reason=reason))

    async def _watch_halt_file(self) -> None:
        while self.stopping is None:
            if (reason := read_halt_file(self.run)) is not None:
                self.halt("file", "HALT", reason)
            elif is_gone(self.run):
                error = StoreError(f"{self.run.path}: is gone; no reply could be kept")
                self.halt("error", "", str(error), error)
            await asyncio.sleep(HALT_POLL_S)

    async def _heartbeat(self) -> None:
        while True:
            if (host := self.sampler.sample()) is not None:
                self.journal.emit(host)
                self._watch.disk(host, self.journal.view.stats)
            if self.journal.full:
                self.halt("disk_full", "", "no space left; free some, then resume")
            await asyncio.to_thread(self._write_status, self._status())
            await asyncio.sleep(HEARTBEAT_S)

    def _background_ended(self, task: asyncio.Task[None]) -> None:
        """A watchman that dies of a defect of ours must not leave a run that cannot be halted."""
        if not task.cancelled() and (error := task.exception()) is not None:
            traceback.print_exception(error)
            reason = f"internal error: {type(error).__name__}: {error}; see output.log"
            self.halt("error", "", reason, EyasError(reason))

    def _status(self) -> Status:
        consoles = self.control.consoles
        return status_of(
            self.run.run_id, self.journal.view, self.started_at, consoles, self.exit_code
        )

    def _write_status(self, status: Status) -> None:
        """A heartbeat whose thread is late must not take the place of the last one."""
        with self._status_lock:
            if status.exit_code == self.exit_code:
                with contextlib.suppress(OSError):  # a full disk is seen by those who must write
                    write_status(self.run, status)

    async def _close(self, state: ev.State, code: int, reason: str) -> None:
        self.exit_code = code
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        if self._background:
            self.sampler.stop()
        self._state(state, reason)
        await asyncio.to_thread(self.journal.flush)
        self._write_status(self._status())
        await self.control.close()
        await asyncio.to_thread(self.journal.close)
        self.reserve.release()


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
