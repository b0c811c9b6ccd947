"""The run's event journal: what may be written to it. Imports nothing from core.

One event is one JSON line `{"v":1,"seq":n,"t_ns":monotonic,"ts":wall,"type":"...", ...}`. Child
stages print the same lines (without seq) on stdout and the engine, the journal's only writer,
numbers them. Per-prompt facts appear once (`outcome`), everything that moves is sampled into
`stats` (1-2 Hz): a reader never sees one line per token."""

from typing import Any, Literal

import msgspec

API_VERSION = 1

State = Literal["starting", "running", "draining", "halting", "halted", "tripped", "done", "failed"]
ENDED: tuple[State, ...] = ("halted", "tripped", "done", "failed")
STAGES = ("generate", "reconstruct", "audit", "vocab", "extract", "train", "evaluate", "export")


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"):
    """The journal stamps v, seq, t_ns and ts when it accepts an event; a bare event has zeros
    there."""

    v: int = 0
    seq: int = 0
    t_ns: int = 0
    ts: float = 0.0


class RunStarted(Event, frozen=True, kw_only=True, tag="run_started"):
    run_id: str
    argv: list[str] = []
    config_hash: str = ""
    budget_usd: float = 0.0
    stages: list[str] = []
    prompts: int = 0
    resumed: bool = False


class StateChanged(Event, frozen=True, kw_only=True, tag="state"):
    state: State
    reason: str = ""


class StageStarted(Event, frozen=True, kw_only=True, tag="stage_started"):
    stage: str
    total: int = 0


class StageProgress(Event, frozen=True, kw_only=True, tag="stage_progress"):
    stage: str
    done: int
    total: int = 0
    detail: str = ""


class StageFinished(Event, frozen=True, kw_only=True, tag="stage_finished"):
    """`summary` holds the stage's headline numbers, JSON scalars only."""

    stage: str
    seconds: float = 0.0
    summary: dict[str, Any] = {}


class StageFailed(Event, frozen=True, kw_only=True, tag="stage_failed"):
    stage: str
    error: str


class Outcome(Event, frozen=True, kw_only=True, tag="outcome"):
    """One prompt has reached its outcome (also `aborted`)."""

    prompt_id: str
    dataset: str
    arm: str
    backend: str
    outcome: str
    sample_id: str = ""
    provider: str | None = None
    error_class: str | None = None
    verdict: str | None = None
    attempt: int = 1
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cost_usd: float | None = None
    latency_s: float | None = None
    calls: int = 0


class ProviderRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A provider now. Quantiles over the last minute and the whole run, seconds."""

    name: str
    backend: str = ""
    in_flight: int = 0
    limit: int = 0
    done: int = 0
    errors: int = 0
    status_429: int = 0
    backoff_s: float = 0.0
    breaker: str = "closed"
    requests_per_min: float = 0.0
    tokens_per_s: float = 0.0
    p50_s: float | None = None
    p99_s: float | None = None
    ttft_p50_s: float | None = None
    usd_per_min: float = 0.0
    spent_usd: float = 0.0
    price_prompt: float = 0.0
    """USD per million tokens, as preflight read it."""
    price_completion: float = 0.0
    stopped: str = ""


class ErrorRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Errors and rejections grouped by (provider, class); `example` is raw text from outside:
    sanitise it."""

    provider: str
    error_class: str
    count: int
    last_ts: float = 0.0
    example: str = ""


class Stats(Event, frozen=True, kw_only=True, tag="stats"):
    """The moving numbers of generate, 2 Hz."""

    in_flight: int = 0
    limit: int = 0
    queued: int = 0
    prompts: int = 0
    done: int = 0
    ok: int = 0
    rejected: int = 0
    failed: int = 0
    refused: int = 0
    aborted: int = 0
    retries: int = 0
    sent: int = 0
    sent_per_min: float = 0.0
    done_per_min: float = 0.0
    tokens_per_s: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    spent_usd: float = 0.0
    reserved_usd: float = 0.0
    uncertain_usd: float = 0.0
    budget_usd: float = 0.0
    usd_per_min: float = 0.0
    exposure_usd: float | None = None
    """The most that can be spent if everything in flight costs its worst case, where that may pass
    the budget (generate.reserve = "p99"); else None."""
    forecast_usd: float | None = None
    forecast_error_usd: float | None = None
    """One standard error; the same for the time."""
    eta_s: float | None = None
    eta_error_s: float | None = None
    live_tokens: int = 0
    """Completion tokens as they stream, requests in flight included."""
    loop_lag_p99_ms: float = 0.0
    providers: list[ProviderRow] = []
    errors: list[ErrorRow] = []
    verdicts: dict[str, int] = {}
    oldest_in_flight_s: float = 0.0


class GpuRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    index: int
    name: str = ""
    util_pct: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    mem_used_bytes: int | None = None
    mem_total_bytes: int | None = None
    temp_c: float | None = None
    throttle: str = ""


class Host(Event, frozen=True, kw_only=True, tag="host"):
    """The machine, 1 Hz. No GPU is a fact, not an error."""

    gpus: list[GpuRow] = []
    cpu_pct: float = 0.0
    cpus: int = 0
    ram_used_bytes: int = 0
    ram_total_bytes: int = 0
    disk_free_bytes: int = 0
    disk_total_bytes: int = 0
    net_rx_bytes_s: float = 0.0
    net_tx_bytes_s: float = 0.0


class Train(Event, frozen=True, kw_only=True, tag="train"):
    """`accuracy_K[k]`: share of supervised positions whose draft k equals the target's
    full-vocabulary argmax."""

    step: int
    total_steps: int
    loss: float
    accuracy_K: list[float] = []
    lr: float = 0.0
    grad_norm: float = 0.0
    tokens_per_s: float = 0.0
    step_s: float = 0.0
    eta_s: float | None = None
    checkpoint_step: int = 0


class Evaluated(Event, frozen=True, kw_only=True, tag="eval"):
    checkpoint: str
    draft_tokens: int
    acceptance_length: float
    untrained: float | None = None
    decoded: float | None = None
    by_dataset: dict[str, float] = {}
    accepted_by_position: list[float] = []
    lossless: str = ""


class AuditRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One dataset x provider line of the semantics report."""

    dataset: str
    provider: str
    arm: str = ""
    samples: int = 0
    trigger_rate: float | None = None
    reference_rate: float | None = None
    p_value: float | None = None
    schema_valid_rate: float | None = None
    name_match_rate: float | None = None
    args_match_rate: float | None = None
    decision: str = ""
    reason: str = ""


class Audit(Event, frozen=True, kw_only=True, tag="audit"):
    rows: list[AuditRow] = []
    findings: dict[str, int] = {}
    exactness: dict[str, Any] = {}


class Tripwire(Event, frozen=True, kw_only=True, tag="tripwire"):
    """A wire that tripped: what it saw, what it cost so far, what to do. `action`: stop_provider |
    stop_dataset | halt."""

    name: str
    scope: str
    saw: str
    cost_usd: float = 0.0
    advice: str = ""
    action: str = "halt"


class Canary(Event, frozen=True, kw_only=True, tag="canary"):
    provider: str
    dataset: str
    passed: bool
    detail: str = ""


class Command(Event, frozen=True, kw_only=True, tag="command"):
    """A mutation that an operator asked for: who, from where, why."""

    name: str
    by: str = ""
    uid: int | None = None
    reason: str = ""


class Halt(Event, frozen=True, kw_only=True, tag="halt"):
    """The halt's own account."""

    source: str
    by: str = ""
    cancelled: int = 0
    received: int = 0
    severed: int = 0
    spent_usd: float = 0.0
    saved_usd: float = 0.0
    uncertain_usd: float = 0.0
    checkpoint_step: int | None = None
    complete: bool = False


class Log(Event, frozen=True, kw_only=True, tag="log"):
    """Raw text: may quote a provider. Readers sanitise."""

    level: Literal["info", "warn", "error"] = "info"
    message: str = ""
    stage: str = ""


class Summary(Event, frozen=True, kw_only=True, tag="summary"):
    """The last page: what was made, what it cost, how exact it was, what the drafter gains."""

    lines: list[str] = []
    data: dict[str, Any] = {}


AnyEvent = (
    RunStarted
    | StateChanged
    | StageStarted
    | StageProgress
    | StageFinished
    | StageFailed
    | Outcome
    | Stats
    | Host
    | Train
    | Evaluated
    | Audit
    | Tripwire
    | Canary
    | Command
    | Halt
    | Log
    | Summary
)

encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder(AnyEvent).decode
