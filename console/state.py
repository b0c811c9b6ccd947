"""What the screens show: core's fold of the events plus what only a viewer needs (histories, link,
age of the data).

Pure: no clock, no file, no socket; every `now` is passed in. Nothing here is sanitised yet: that is
done where text becomes cells.
"""

from collections import Counter, deque
from typing import NamedTuple

from console import format as f
from core import events as ev
from core import view as vw

HISTORY = 600  # samples kept per sparkline: five minutes at 2 Hz
STALE_S, SILENT_S = 5.0, 60.0
HALT_WORDS = ("halting", "halted", "tripped", "failed")


class LogLine(NamedTuple):
    """One line of the merged log: text is raw."""

    seq: int
    ts: float
    level: str
    source: str
    text: str


class Series:
    """Rings of the numbers that become sparklines."""

    def __init__(self) -> None:
        self.done_per_min: deque[float] = deque(maxlen=HISTORY)
        self.usd_per_min: deque[float] = deque(maxlen=HISTORY)
        self.cpu: deque[float] = deque(maxlen=HISTORY)
        self.net_rx: deque[float] = deque(maxlen=HISTORY)
        self.gpu_util: dict[int, deque[float | None]] = {}  # shares; None: not reported
        self.accuracy: list[deque[float]] = []

    def add(self, event: ev.Event) -> None:
        if isinstance(event, ev.Stats):
            self.done_per_min.append(event.done_per_min)
            self.usd_per_min.append(event.usd_per_min)
        elif isinstance(event, ev.Host):
            self.cpu.append(event.cpu_pct / 100)
            self.net_rx.append(event.net_rx_bytes_s)
            for gpu in event.gpus:
                ring: deque[float | None] = self.gpu_util.setdefault(
                    gpu.index, deque(maxlen=HISTORY)
                )
                ring.append(None if gpu.util_pct is None else gpu.util_pct / 100)
        elif isinstance(event, ev.Train):
            while len(self.accuracy) < len(event.accuracy_K):
                self.accuracy.append(deque(maxlen=HISTORY))
            for accuracy, value in zip(self.accuracy, event.accuracy_K, strict=False):
                accuracy.append(value)

    def extend(self, newer: "Series") -> None:
        """Append what `newer` has seen since."""
        for name in ("done_per_min", "usd_per_min", "cpu", "net_rx"):
            getattr(self, name).extend(getattr(newer, name))
        for index, ring in newer.gpu_util.items():
            self.gpu_util.setdefault(index, deque(maxlen=HISTORY)).extend(ring)
        for k, accuracy in enumerate(newer.accuracy):
            if k < len(self.accuracy):
                self.accuracy[k].extend(accuracy)
            else:
                self.accuracy.append(accuracy)


class ConsoleState:
    """One run as the console knows it."""

    def __init__(self, run_id: str, read_only: bool = False) -> None:
        self.run_id = run_id
        self.read_only = read_only
        self.view = vw.RunView()
        self.series = Series()
        self.link = "connecting"
        self.link_note = ""
        self.halt_armed: bool | None = None  # None: there is nothing to halt
        self.halt_pressed_at = 0.0
        self.crashed = False
        self.received_at = 0.0
        self.frozen = False
        self.refresh_hz = 2.0
        self.consoles = 0
        self.attached_seq = 0  # what came later, came while this console watched
        self.states: list[
            LogLine
        ] = []  # state changes and stage ends, which the core view folds away

    # ── feeding ──────────────────────────────────────────────────────────────────────────────

    def load(self, view: vw.RunView, now: float) -> None:
        """A snapshot replaces the view; histories stay."""
        self.attached_seq = self.attached_seq or view.seq
        self.view = view
        self.received_at = now
        self.crashed = False
        self.states = [line for line in self.states if line.seq <= view.seq]

    def apply(self, event: ev.Event, now: float) -> None:
        """One event; a repeated one changes nothing."""
        if event.seq and event.seq <= self.view.seq:
            return
        vw.fold(self.view, event)
        self.series.add(event)
        self.received_at = now
        if (line := _as_line(event)) is not None:
            self.states.append(line)
            del self.states[:-200]
        if isinstance(event, ev.StateChanged):
            self.crashed = False
            if event.state == "running":
                self.halt_pressed_at = 0.0

    def recall(self, events: list[ev.Event]) -> None:
        """Events from before the snapshot: only histories and log lines learn from them."""
        past = Series()
        for event in events:
            past.add(event)
            if (line := _as_line(event)) is not None and line not in self.states:
                self.states.append(line)
        past.extend(self.series)
        self.series = past
        self.states.sort(key=lambda entry: entry.seq)
        del self.states[:-200]

    # ── asking ───────────────────────────────────────────────────────────────────────────────

    @property
    def state(self) -> str:
        """The run's state; `crashed` when its process is gone without a word."""
        return "crashed" if self.crashed else self.view.state

    @property
    def finished(self) -> bool:
        return self.crashed or self.view.state in ev.ENDED

    @property
    def stage(self) -> vw.StageView | None:
        """The stage that works now, else the last that did."""
        running = [s for s in self.view.stages.values() if s.status == "running"]
        if running:
            return running[-1]
        touched = [s for s in self.view.stages.values() if s.status != "waiting"]
        return touched[-1] if touched else None

    def progress(self, stage: vw.StageView) -> tuple[int, int]:
        """(done, total) of a stage; generate is counted by its own numbers."""
        stats = self.view.stats
        if stage.name == "generate" and stats is not None and stats.prompts:
            return stats.done, stats.prompts
        return stage.done, stage.total

    @property
    def training_phase(self) -> bool:
        """After generation is over the board shows training where it showed providers."""
        generate = self.view.stages.get("generate")
        return generate is not None and generate.status == "done"

    @property
    def budget_usd(self) -> float:
        if self.view.stats and self.view.stats.budget_usd:
            return self.view.stats.budget_usd
        return self.view.started.budget_usd if self.view.started else 0.0

    @property
    def spent_usd(self) -> float:
        return self.view.stats.spent_usd if self.view.stats else 0.0

    @property
    def most_usd(self) -> float | None:
        """What the bill may come to if all in flight cost their worst case, while that may pass the
        budget."""
        stats = self.view.stats
        return stats.exposure_usd if stats and stats.in_flight and not self.finished else None

    def elapsed_s(self, wall: float) -> float | None:
        """Since the run (this life of it) began; stands still once it has ended."""
        if self.view.started is None:
            return None
        end = self.view.ts if self.finished else wall
        return max(0.0, end - self.view.started.ts)

    def eta_s(self) -> float | None:
        """The engine's estimate for the stage that works now: only generate and train make one."""
        name = self.stage.name if self.stage is not None and not self.finished else ""
        if name == "train":
            return self.view.train.eta_s if self.view.train else None
        if name == "generate":
            return self.view.stats.eta_s if self.view.stats else None
        return None

    def eta_error_s(self) -> float | None:
        """Its standard error, where the engine knows one."""
        generating = self.stage is not None and self.stage.name == "generate"
        return self.view.stats.eta_error_s if generating and self.view.stats else None

    def age_s(self, now: float) -> float | None:
        """Seconds since anything arrived."""
        return None if not self.received_at else max(0.0, now - self.received_at)

    def budget_left_s(self) -> float | None:
        """How long the budget lasts at the present burn rate."""
        stats = self.view.stats
        if stats is None or stats.usd_per_min <= 0 or not self.budget_usd:
            return None
        return max(0.0, (self.budget_usd - stats.spent_usd) / stats.usd_per_min * 60)

    @property
    def halt_shown(self) -> bool:
        return self.view.state in HALT_WORDS or bool(self.halt_pressed_at) or self.crashed

    @property
    def verdicts(self) -> dict[str, int]:
        """Samples by verdict: the rebuild's last word once it is there, the live count before."""
        stage = self.view.stages.get("reconstruct")
        final = stage.summary.get("verdicts") if stage is not None else None
        if isinstance(final, dict):
            return {str(k): v for k, v in final.items() if isinstance(v, int)}
        live = Counter(self.view.verdicts_before)
        live.update(self.view.stats.verdicts if self.view.stats else {})
        return dict(live)

    def admitted(self) -> tuple[int, int]:
        """Samples that may be trained on, and all that were judged."""
        verdicts = self.verdicts
        return sum(verdicts.get(v, 0) for v in ("exact", "consistent")), sum(verdicts.values())

    def log_lines(self) -> list[LogLine]:
        """Log, commands, tripwires, canaries and stage ends in the order of the journal."""
        view = self.view
        lines = [LogLine(e.seq, e.ts, e.level, e.stage, e.message) for e in view.log]
        for command in view.commands:
            why = f" ({command.reason})" if command.reason else ""
            text = f"{command.name} by {command.by or 'someone'}{why}"
            lines.append(LogLine(command.seq, command.ts, "warn", "operator", text))
        for wire in view.tripwires:
            text = f"{wire.name} [{wire.scope}] {wire.saw}; {wire.advice}"
            lines.append(LogLine(wire.seq, wire.ts, "error", "tripwire", text))
        for canary in view.canaries:
            word = "passed" if canary.passed else "FAILED"
            text = f"canary {word}: {canary.provider} on {canary.dataset} {canary.detail}".rstrip()
            level = "info" if canary.passed else "error"
            lines.append(LogLine(canary.seq, canary.ts, level, "canary", text))
        lines.extend(self.states)
        lines.sort(key=lambda entry: entry.seq)
        return lines


def _as_line(event: ev.Event) -> LogLine | None:
    match event:
        case ev.StateChanged():
            why = f": {event.reason}" if event.reason else ""
            level = "info" if event.state in ("running", "done", "starting") else "warn"
            said = event.reason.startswith(event.state)  # "halted (...)"
            text = event.reason if said else f"{event.state}{why}"
            return LogLine(event.seq, event.ts, level, "run", text)
        case ev.StageFinished():
            text = f"{event.stage} done in {event.seconds:.1f} s"
            return LogLine(event.seq, event.ts, "info", event.stage, text)
        case ev.StageFailed():
            return LogLine(
                event.seq, event.ts, "error", event.stage, f"{event.stage} failed: {event.error}"
            )
        case ev.Halt():
            if event.complete:
                text = f"halt complete: {'; '.join(f.halt_account(event))}"
                return LogLine(event.seq, event.ts, "warn", "halt", text)
    return None
