"""What a reader needs to know of a run, folded from its events. Pure: no clock, no file, no socket.

The engine folds its own events to write state snapshots; consoles fold the same function over the
tail.
"""

from typing import Any

import msgspec

from core import events as ev

KEEP_OUTCOMES = 2_000
KEEP_LOG = 500
KEEP_TRAIN = 1_200
STILL: dict[str, Any] = {
    **dict.fromkeys(("sent_per_min", "done_per_min", "tokens_per_s", "usd_per_min"), 0.0),
    "verdicts": {},
    **dict.fromkeys(("forecast_usd", "forecast_error_usd", "eta_s", "eta_error_s")),
}
"""Of the statistics, what a new life knows nothing of before it has sent something."""


class StageView(msgspec.Struct):
    name: str
    status: str = "waiting"  # waiting | running | done | failed
    done: int = 0
    total: int = 0
    detail: str = ""
    seconds: float = 0.0
    summary: dict[str, Any] = {}
    error: str = ""


class RunView(msgspec.Struct):
    """Mutable on purpose: `fold` updates in place; at 83,000 outcomes a copy per event would be
    quadratic."""

    seq: int = 0
    ts: float = 0.0
    state: str = "starting"
    reason: str = ""
    started: ev.RunStarted | None = None
    stages: dict[str, StageView] = {}
    stats: ev.Stats | None = None
    verdicts_before: dict[str, int] = {}
    """Live verdicts of earlier lives: those of `stats` are this life's."""
    host: ev.Host | None = None
    train: ev.Train | None = None
    train_history: list[tuple[int, float]] = []
    evaluated: ev.Evaluated | None = None
    audit: ev.Audit | None = None
    halt: ev.Halt | None = None
    tripwires: list[ev.Tripwire] = []
    canaries: list[ev.Canary] = []
    commands: list[ev.Command] = []
    outcomes: list[ev.Outcome] = []
    log: list[ev.Log] = []
    summary: ev.Summary | None = None

    def stage(self, name: str) -> StageView:
        return self.stages.setdefault(name, StageView(name=name))


def fold(view: RunView, event: ev.Event) -> RunView:
    """Apply one event. Events at or below `view.seq` are ignored, so a snapshot plus an overlapping
    tail is safe."""
    if event.seq and event.seq <= view.seq:
        return view
    view.seq, view.ts = event.seq or view.seq, event.ts or view.ts
    match event:
        case ev.RunStarted():
            view.started, view.halt = event, None  # how an earlier life ended is its own business
            if view.stats is not None:
                for name, count in view.stats.verdicts.items():
                    view.verdicts_before[name] = view.verdicts_before.get(name, 0) + count
                view.stats = msgspec.structs.replace(view.stats, **STILL)
            for name in event.stages:
                view.stage(name)
        case ev.StateChanged():
            view.state, view.reason = event.state, event.reason
        case ev.StageStarted():
            view.stages[event.stage] = StageView(
                name=event.stage, status="running", total=event.total
            )
        case ev.StageProgress():
            stage = view.stage(event.stage)
            stage.done, stage.total = event.done, event.total or stage.total
            stage.detail = event.detail or stage.detail
        case ev.StageFinished():
            stage = view.stage(event.stage)
            stage.status, stage.seconds, stage.summary = "done", event.seconds, event.summary
            stage.done = stage.total or stage.done
        case ev.StageFailed():
            stage = view.stage(event.stage)
            stage.status, stage.error = "failed", event.error
        case ev.Stats():
            if not event.providers and view.stats is not None:  # who gives up asks nobody
                event = msgspec.structs.replace(event, providers=view.stats.providers)
            view.stats = event
        case ev.Host():
            view.host = event
        case ev.Train():
            view.train = event
            view.train_history.append((event.step, event.loss))
            if len(view.train_history) > KEEP_TRAIN:  # halve the resolution, keep the whole curve
                del view.train_history[1:-1:2]
        case ev.Evaluated():
            view.evaluated = event
        case ev.Audit():
            view.audit = event
        case ev.Halt():
            view.halt = event
        case ev.Tripwire():
            view.tripwires.append(event)
        case ev.Canary():
            view.canaries.append(event)
        case ev.Command():
            view.commands.append(event)
        case ev.Outcome():
            view.outcomes.append(event)
            _trim(view.outcomes, KEEP_OUTCOMES)
        case ev.Log():
            view.log.append(event)
            _trim(view.log, KEEP_LOG)
        case ev.Summary():
            view.summary = event
        case _:
            raise AssertionError(f"unknown event {type(event).__name__}")
    return view


def _trim(rows: list[Any], keep: int) -> None:
    """Drop the oldest in bulk, so that an append costs O(1) on average."""
    if len(rows) > keep + keep // 4:
        del rows[:-keep]


encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder(RunView).decode
