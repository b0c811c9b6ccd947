"""A recorded run for the console's tests and screenshots: every type of event, hostile text
included, no clock.

`events(upto)` is the same list every time; `write_run` puts it on disk as a run directory with
samples.
"""

import json
import math
import random

import msgspec

from core import events as ev
from tests.console.recorded_numbers import (
    AUDIT,
    BASE_TS,
    HOSTILE,
    PROMPTS,
    RUN_ID,
    host,
    outcome,
    stats,
)

__all__ = ["AUDIT", "BASE_TS", "HOSTILE", "PROMPTS", "RUN_ID", "host", "outcome", "stats"]

PHASES = ("generate", "halted", "tripped", "train", "done")


class _Stamp:
    """Numbers and times events the way the journal does."""

    def __init__(self) -> None:
        self.seq = 0
        self.events: list[ev.Event] = []

    def __call__(self, at_s: float, event: ev.Event) -> None:
        self.seq += 1
        stamped = {"v": 1, "seq": self.seq, "t_ns": int(at_s * 1e9), "ts": BASE_TS + at_s}
        line = json.loads(ev.encode(event)) | stamped
        self.events.append(ev.decode(json.dumps(line).encode()))


def events(upto: str = "generate") -> list[ev.Event]:
    """The run up to a phase: `generate` (61 % done), `halted`, `tripped`, `train` or `done`."""
    if upto not in PHASES:
        raise ValueError(f"{upto}: one of {PHASES}")
    emit = _Stamp()
    emit(
        0,
        ev.RunStarted(
            run_id=RUN_ID,
            argv=["eyas", "demo"],
            budget_usd=10.0,
            stages=list(ev.STAGES),
            prompts=PROMPTS,
        ),
    )
    emit(0.1, ev.StateChanged(state="running"))
    emit(0.2, ev.Log(message="gateway listens on 127.0.0.1:41873", stage="generate"))
    emit(0.3, ev.StageStarted(stage="generate", total=PROMPTS))
    share = 0.61 if upto in ("generate", "halted", "tripped") else 1.0
    _generate(emit, share)
    if upto == "halted":
        _halt(emit)
    elif upto == "tripped":
        _trip(emit)
    elif upto in ("train", "done"):
        _middle(emit)
        _train(emit, 1.0 if upto == "done" else 0.58)
        if upto == "done":
            _end(emit)
    return emit.events


def _generate(emit: _Stamp, share: float) -> None:
    rng = random.Random(7)
    ticks = int(82 * share) * 2
    for tick in range(ticks + 1):
        at_s = 0.5 + tick / 2
        done = (
            min(PROMPTS, int(PROMPTS * (tick / 164) ** 1.08))
            if share < 1
            else int(PROMPTS * tick / ticks)
        )
        if tick % 2 == 0:
            emit(at_s, host(tick, rng))
        emit(at_s, stats(tick, done, rng))
        if tick % 8 == 0:
            emit(at_s, ev.StageProgress(stage="generate", done=done, total=PROMPTS))
            emit(at_s, outcome(tick // 8))
        if tick == 12:
            for provider in ("kestrel", "harrier", "local"):
                emit(
                    at_s,
                    ev.Canary(
                        provider=provider, dataset="tools", passed=True, detail="8 of 8 exact"
                    ),
                )
        if tick == 20:
            emit(
                at_s,
                ev.Log(
                    level="warn",
                    message="harrier answered 429, Retry-After 4 s: waiting",
                    stage="generate",
                ),
            )
        if tick == 33:
            emit(
                at_s,
                ev.Log(
                    level="error",
                    message=f"merlin: unknown_marker in reply: {HOSTILE}",
                    stage="generate",
                ),
            )
        if tick == 41:
            emit(at_s, ev.Command(name="ping", by="alice", uid=1000))
        if tick == 60:
            emit(
                at_s,
                ev.Log(
                    message="stop-token offset of kestrel is 0, of harrier -1 (16 samples each)",
                    stage="generate",
                ),
            )
        if tick == 90:
            emit(at_s, ev.Log(message="twin arm: 48 of 64 local samples are in", stage="generate"))
    emit(0.5 + ticks / 2, AUDIT)


def _halt(emit: _Stamp) -> None:
    emit(51.0, ev.Command(name="halt", by="alice", uid=1000, reason="harrier looks wrong"))
    emit(51.0, ev.StateChanged(state="halting", reason="halt by alice"))
    emit(51.1, ev.Halt(source="key", by="alice", cancelled=31, received=0, spent_usd=0.2564))
    emit(
        52.4,
        ev.Halt(
            source="key",
            by="alice",
            cancelled=37,
            received=11,
            spent_usd=0.2631,
            saved_usd=0.0892,
            uncertain_usd=0.0021,
            complete=True,
        ),
    )
    emit(
        52.4,
        msgspec.structs.replace(
            stats(101, 119, random.Random(3)),
            in_flight=0,
            reserved_usd=0.0,
            aborted=37,
            usd_per_min=0.0,
            eta_s=None,
        ),
    )
    emit(52.5, ev.StateChanged(state="halted", reason="halt by alice"))


def _trip(emit: _Stamp) -> None:
    emit(
        51.0,
        ev.Tripwire(
            name="trigger_rate",
            scope="harrier/tools",
            saw="61% of 31 replies call a tool, 92% of the local arm's (p=2e-5)",
            cost_usd=0.031,
            advice="open the probe on harrier, then pin other providers",
            action="halt",
        ),
    )
    emit(51.0, ev.StateChanged(state="tripped", reason="trigger_rate on harrier/tools"))
    emit(
        52.0,
        ev.Halt(
            source="tripwire",
            cancelled=37,
            received=11,
            spent_usd=0.2631,
            saved_usd=0.0892,
            complete=True,
        ),
    )


def _middle(emit: _Stamp) -> None:
    at_s = 84.0
    emit(
        at_s,
        ev.StageFinished(stage="generate", seconds=83.6, summary={"ok": 194, "spent_usd": 0.4345}),
    )
    for stage, seconds, summary in (
        ("reconstruct", 1.2, {"samples": 204}),
        ("audit", 2.1, {"findings": 6}),
        ("vocab", 0.4, {"coverage": 0.997}),
        ("extract", 6.8, {"tokens": 57_936}),
    ):
        emit(at_s, ev.StageStarted(stage=stage, total=PROMPTS))
        emit(at_s + seconds / 2, ev.StageProgress(stage=stage, done=PROMPTS // 2, total=PROMPTS))
        at_s += seconds
        emit(at_s, ev.StageFinished(stage=stage, seconds=seconds, summary=summary))
    emit(at_s, ev.StageStarted(stage="train", total=400))


def _train(emit: _Stamp, share: float) -> None:
    rng = random.Random(11)
    for step in range(0, int(400 * share) + 1, 4):
        at_s = 95 + step / 5
        loss = 1.1 + 6.2 * math.exp(-step / 70) + rng.uniform(-0.09, 0.09)
        accuracy = [
            max(0.0, (0.86 - 0.11 * k) * (1 - math.exp(-step / (60 + 12 * k)))) for k in range(7)
        ]
        emit(
            at_s,
            ev.Train(
                step=step,
                total_steps=400,
                loss=loss,
                accuracy_K=accuracy,
                lr=1e-3 * (1 - step / 440),
                grad_norm=0.41 + rng.uniform(0, 0.1),
                tokens_per_s=5210 + rng.uniform(-200, 200),
                step_s=0.2,
                eta_s=(400 - step) / 5,
                checkpoint_step=step // 100 * 100,
            ),
        )
        emit(at_s, ev.StageProgress(stage="train", done=step, total=400))
        if step % 20 == 0:
            emit(at_s, host(step, rng))


def _end(emit: _Stamp) -> None:
    emit(176, ev.StageFinished(stage="train", seconds=81.0, summary={"loss": 1.12}))
    emit(176, ev.StageStarted(stage="evaluate", total=20))
    emit(
        190,
        ev.Evaluated(
            checkpoint="checkpoints/400",
            draft_tokens=3,
            acceptance_length=2.87,
            untrained=1.01,
            decoded=2.8704,
            by_dataset={"tools": 3.21, "chat": 2.44, "code": 2.71},
            accepted_by_position=[0.81, 0.64, 0.42],
            lossless="20 of 20",
        ),
    )
    emit(190, ev.StageFinished(stage="evaluate", seconds=14.0, summary={"acceptance_length": 2.87}))
    emit(190, ev.StageStarted(stage="export", total=2))
    emit(192, ev.StageFinished(stage="export", seconds=2.0, summary={"sglang": "ok", "vllm": "ok"}))
    lines = [
        "made      195 of 204 samples kept, 18,412 of 19,584 completion tokens; prompts: 195 ok",
        "cost      $0.4345 of $10.00, $23.601 per million kept tokens; $0.0021 of it uncertain",
        "exact     91 exact · 97 consistent · 3 hypothesis · 1 mismatch · 8 rejected",
        "drafter   2.87 tokens per target forward with 3 draft tokens (untrained 1.01)",
        "exported  export/sglang · export/vllm",
    ]
    data = {
        "run_id": RUN_ID,
        "samples": 204,
        "kept_samples": 195,
        "verdicts": {"exact": 91, "consistent": 97},
        "spent_usd": 0.4345,
        "budget_usd": 10.0,
        "drafter": {"acceptance_length": 2.87, "untrained": 1.01, "decoded": 2.8704},
    }
    emit(192.5, ev.Summary(lines=lines, data=data))
    emit(192.6, ev.StateChanged(state="done"))
