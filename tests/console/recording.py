"""A recorded run for the console's tests and screenshots: every type of event, hostile text
included, no clock.

`events(upto)` is the same list every time; `write_run` puts it on disk as a run directory with
samples.
"""

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import msgspec

from core import events as ev
from core.config import Config, dump
from core.schema import Sample, Segment
from core.store import RunDir, write_samples

BASE_TS = 1_764_417_600.0  # 2025-11-29 12:00:00 UTC
RUN_ID = "20251129-120000-ab12"
HOSTILE = (
    "\x1b]0;owned\x07\x1b[2J[red]not markup[/red] [/nonsense] \u202egnp.exe\u202c "
    "\u200bzero\u00ad \x9b31m 日本語 👍🏽"
)
PHASES = ("generate", "halted", "tripped", "train", "done")
PROMPTS = 204


class Encoder(Protocol):
    """The part of a tokenizer that is needed to write samples."""

    def encode_special(self, text: str) -> list[int]: ...


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


def host(tick: int, rng: random.Random) -> ev.Host:
    return ev.Host(
        cpu_pct=62 + 25 * math.sin(tick / 7) + rng.uniform(-6, 6),
        cpus=2,
        ram_used_bytes=3_120_000_000,
        ram_total_bytes=8_200_000_000,
        disk_free_bytes=41_200_000_000,
        disk_total_bytes=105_000_000_000,
        net_rx_bytes_s=184_000 + 40_000 * math.sin(tick / 5),
        net_tx_bytes_s=62_000.0,
    )


def stats(tick: int, done: int, rng: random.Random) -> ev.Stats:
    rejected = done // 23
    failed = 1 if done > 60 else 0
    ok = done - rejected - failed
    ramp = min(1.0, tick / 20)
    in_flight = int(48 * ramp) if done < PROMPTS else 0
    per_min = 150 * ramp + 18 * math.sin(tick / 6) + rng.uniform(-6, 6)
    spent = done * 0.00213
    return ev.Stats(
        in_flight=in_flight,
        limit=64,
        queued=max(0, PROMPTS - done - in_flight),
        prompts=PROMPTS,
        done=done,
        ok=ok,
        rejected=rejected,
        failed=failed,
        retries=3 + tick // 25,
        sent=done + in_flight + 3,
        sent_per_min=per_min * 1.04,
        done_per_min=max(0.0, per_min),
        tokens_per_s=max(0.0, per_min * 21.3),
        prompt_tokens=done * 188,
        completion_tokens=done * 96,
        spent_usd=spent,
        reserved_usd=in_flight * 0.0061,
        uncertain_usd=0.0021 if done > 60 else 0.0,
        budget_usd=10.0,
        usd_per_min=max(0.0, per_min) * 0.00213,
        forecast_usd=PROMPTS * 0.00219,
        eta_s=(PROMPTS - done) / 2.4 if done < PROMPTS else None,
        loop_lag_p99_ms=3.4,
        oldest_in_flight_s=6.2 + 3 * math.sin(tick / 9),
        providers=_providers(done, in_flight, ramp),
        errors=_errors(tick),
        verdicts={
            "exact": done * 45 // 100,
            "consistent": done * 48 // 100,
            "hypothesis": done // 60,
            "mismatch": done // 110,
            "unverifiable": done // 100,
            "rejected": rejected,
        },
    )


def _providers(done: int, in_flight: int, ramp: float) -> list[ev.ProviderRow]:
    if ramp == 0:
        return []
    return [
        ev.ProviderRow(
            name="local",
            backend="sglang",
            in_flight=in_flight // 4,
            limit=16,
            done=done * 45 // 100,
            p50_s=1.12,
            p99_s=2.31,
            ttft_p50_s=0.084,
            tokens_per_s=1240 * ramp,
            requests_per_min=61 * ramp,
        ),
        ev.ProviderRow(
            name="kestrel",
            backend="openrouter",
            in_flight=in_flight // 2,
            limit=24,
            done=done * 35 // 100,
            errors=1,
            p50_s=1.94,
            p99_s=4.02,
            ttft_p50_s=0.312,
            tokens_per_s=1010 * ramp,
            usd_per_min=0.214 * ramp,
            spent_usd=done * 0.00121,
            requests_per_min=52 * ramp,
        ),
        ev.ProviderRow(
            name="harrier",
            backend="openrouter",
            in_flight=in_flight // 6,
            limit=16,
            done=done * 16 // 100,
            errors=2,
            status_429=14,
            backoff_s=4.0,
            p50_s=2.42,
            p99_s=9.8,
            ttft_p50_s=0.54,
            tokens_per_s=610 * ramp,
            usd_per_min=0.088 * ramp,
            spent_usd=done * 0.00071,
            requests_per_min=30 * ramp,
        ),
        ev.ProviderRow(
            name="merlin",
            backend="openrouter",
            in_flight=in_flight // 12,
            limit=8,
            done=done * 4 // 100,
            errors=6,
            breaker="open",
            p50_s=3.1,
            p99_s=18.4,
            ttft_p50_s=1.2,
            tokens_per_s=120 * ramp,
            usd_per_min=0.018 * ramp,
            spent_usd=done * 0.00021,
            requests_per_min=6 * ramp,
        ),
    ]


def _errors(tick: int) -> list[ev.ErrorRow]:
    if tick < 20:
        return []
    return [
        ev.ErrorRow(
            provider="harrier",
            error_class="rate_limited",
            count=14 + tick // 30,
            last_ts=BASE_TS + tick / 2,
            example='{"error":{"code":429,"message":"slow down"}}',
        ),
        ev.ErrorRow(
            provider="merlin",
            error_class="unknown_marker",
            count=4,
            last_ts=BASE_TS + 17,
            example=HOSTILE,
        ),
        ev.ErrorRow(
            provider="merlin",
            error_class="body_not_json",
            count=2,
            last_ts=BASE_TS + 15,
            example="<html><title>502 Bad Gateway</title>\n<body>nginx\x1b[31m</body></html>",
        ),
        ev.ErrorRow(
            provider="kestrel",
            error_class="tool_args_invalid",
            count=1,
            last_ts=BASE_TS + 19,
            example='{"city": "Ulm',
        ),
    ]


def outcome(n: int) -> ev.Outcome:
    kinds = (
        ("ok", "exact", None),
        ("ok", "consistent", None),
        ("rejected", "rejected", "unknown_marker"),
        ("ok", "mismatch", None),
    )
    outcome, verdict, error_class = kinds[0 if n % 7 else 2] if n % 2 else kinds[1 if n % 5 else 3]
    local = n % 2 == 1
    return ev.Outcome(
        prompt_id=f"{n:04x}aa55",
        sample_id=f"{n:04x}aa55",
        dataset=("tools", "chat", "code")[n % 3],
        arm="local" if local else "declared",
        backend="sglang" if local else "openrouter",
        provider="local" if local else ("kestrel", "harrier")[n % 4 // 2],
        outcome=outcome,
        verdict=verdict,
        error_class=error_class,
        prompt_tokens=150 + n,
        completion_tokens=64 + 3 * n,
        cost_usd=0.0 if local else 0.0031,
        latency_s=1.2 + n / 10,
        calls=n % 3,
    )


AUDIT = ev.Audit(
    rows=[
        ev.AuditRow(
            dataset="tools",
            provider="kestrel",
            arm="declared",
            samples=58,
            trigger_rate=0.914,
            reference_rate=0.922,
            p_value=0.77,
            schema_valid_rate=1.0,
            name_match_rate=0.98,
            args_match_rate=0.94,
            decision="keep",
        ),
        ev.AuditRow(
            dataset="tools",
            provider="harrier",
            arm="declared",
            samples=31,
            trigger_rate=0.61,
            reference_rate=0.922,
            p_value=0.00002,
            schema_valid_rate=0.97,
            name_match_rate=0.9,
            args_match_rate=0.81,
            decision="filter",
            reason="triggers tools far less often than the local arm",
        ),
        ev.AuditRow(
            dataset="chat",
            provider="kestrel",
            arm="declared",
            samples=40,
            trigger_rate=0.0,
            reference_rate=0.0,
            decision="keep",
        ),
    ],
    findings={"name_undeclared": 2, "args_schema": 1, "reasoning_empty": 3},
    exactness={"rate": 0.9981, "pairs": 64},
)


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


def sample_pairs(tokenizer: "Encoder") -> Iterator[Sample]:
    """A local sample, its API twin that differs in three places, and a hostile one."""
    encode = tokenizer.encode_special
    prompt = (
        "<|im_user|>user<|im_middle|>Weather in Ulm and Bonn?<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><think>"
    )
    call = (
        "<|tool_call_begin|>functions.weather:{n}"
        "<|tool_call_argument_begin|>{args}<|tool_call_end|>"
    )
    head = "Two cities, two calls.</think>{gap}Let me look.<|tool_calls_section_begin|>"
    calls = call.format(n=0, args='{"city": "Ulm"}') + call.format(n=1, args='{"city": "Bonn"}')
    tail = "<|tool_calls_section_end|><|im_end|>"
    texts = {
        ("local", "local", "exact"): head.format(gap="\n\n") + calls + tail,
        ("declared", "kestrel", "mismatch"): head.format(gap="\n")
        + calls.replace(": ", ":")
        + tail,
        ("declared", "merlin", "rejected"): "done</think>"
        + HOSTILE.replace("\x9b", "\u009b")
        + "<|im_end|>",
    }
    prompt_ids = list(encode(prompt))
    for n, ((arm, provider, verdict), text) in enumerate(texts.items()):
        ids = list(encode(text))
        yield Sample(
            sample_id=f"{n:04x}aa55",
            prompt_id=f"{n:04x}aa55",
            twin_id="t0" if n < 2 else "t1",
            dataset="tools",
            arm=arm,
            backend="sglang" if arm == "local" else "openrouter",
            provider=provider,
            token_ids=prompt_ids + ids,
            prompt_len=len(prompt_ids),
            verdict=verdict,
            error_class="unknown_marker" if verdict == "rejected" else None,
            flags=["gap_changed"] if verdict == "mismatch" else [],
            segments=[Segment(kind="reasoning", start=0, end=5)],
            finish_reason="tool_calls",
            rebuilt_tokens=len(ids),
            billed_tokens=len(ids) + (2 if verdict == "mismatch" else 0),
            cost_usd=0.0031,
        )


def write_run(folder: Path, upto: str = "done", tokenizer: "Encoder | None" = None) -> RunDir:
    """The recording as a run directory (no engine)."""
    run = RunDir(folder / RUN_ID)
    run.journal.mkdir(parents=True)
    run.state.mkdir()
    run.samples.mkdir()
    run.config_toml.write_text(dump(Config()), encoding="utf-8")
    manifest = {
        "v": 1,
        "run_id": RUN_ID,
        "argv": ["eyas", "demo"],
        "host": "rec",
        "boot_id": "none",
        "created_at": BASE_TS,
        "started_at": BASE_TS,
        "lives": 1,
    }
    run.manifest.write_text(json.dumps(manifest), encoding="utf-8")
    recorded = events(upto)
    (run.journal / "000001.jsonl").write_bytes(b"".join(ev.encode(e) + b"\n" for e in recorded))
    state = next((e.state for e in reversed(recorded) if isinstance(e, ev.StateChanged)), "running")
    numbers = next((e for e in reversed(recorded) if isinstance(e, ev.Stats)), ev.Stats())
    status = {
        "v": 1,
        "run_id": RUN_ID,
        "state": state,
        "seq": recorded[-1].seq,
        "ts": recorded[-1].ts,
        "started_at": BASE_TS,
        "prompts": PROMPTS,
        "done": numbers.done,
        "ok": numbers.ok,
        "spent_usd": numbers.spent_usd,
        "budget_usd": 10.0,
    }
    run.status.write_text(json.dumps(status), encoding="utf-8")
    if tokenizer is not None:
        write_samples(run, sample_pairs(tokenizer))
    return run


class Letters:
    """A tokenizer for pictures: words, single bytes and Kimi's marker names, the same for ever."""

    words = (
        " two",
        "Two",
        " cities",
        " calls",
        "Let",
        " me",
        " look",
        "functions",
        ".weather",
        "city",
        "\n\n",
        "Ulm",
        "Bonn",
        ' "',
    )
    markers = (
        "<|im_end|>",
        "<|im_user|>",
        "<|im_assistant|>",
        "<|im_middle|>",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<think>",
        "</think>",
    )
    vocab_size = 256 + len(words) + len(markers)

    def encode_special(self, text: str) -> list[int]:
        pieces = (*self.words, *self.markers)
        longest_first = sorted(range(len(pieces)), key=lambda i: -len(pieces[i]))
        ids: list[int] = []
        while text:
            found = next((i for i in longest_first if text.startswith(pieces[i])), None)
            if found is None:
                ids.extend(text[0].encode("utf-8", "surrogatepass"))
                text = text[1:]
            else:
                ids.append(256 + found)
                text = text[len(pieces[found]) :]
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < 256:
            return bytes([token_id])
        return (*self.words, *self.markers)[token_id - 256].encode()

    def is_special(self, token_id: int) -> bool:
        return token_id >= 256 + len(self.words)
