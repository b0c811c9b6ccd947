"""The records that stages exchange. Frozen, versioned, no tensors, no behaviour beyond trivial
views.

    prompts -> Prompt -> generate -> Rollout -> reconstruct -> Sample | Rejected -> audit -> Finding
    samples -> extract -> FeatureRef -> train -> checkpoint -> evaluate -> EvalReport -> export

Everything here is msgspec: `msgspec.json.encode(record)` is the line on disk.
"""

import zlib
from typing import Any, Literal, Protocol

import msgspec

SCHEMA_VERSION = 1

Message = dict[str, Any]
Tool = dict[str, Any]
Arm = Literal["local", "declared", "text"]
Outcome = Literal["ok", "rejected", "failed", "refused", "aborted"]
Verdict = Literal["exact", "consistent", "hypothesis", "mismatch", "unverifiable", "rejected"]
TRAINABLE: tuple[Verdict, ...] = ("exact", "consistent")


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all records."""


class Prompt(Record, frozen=True, kw_only=True):
    """One question to carry to exactly one outcome.

    `twin_id` is the hash of (messages, tools, thinking): the same question asked through another
    arm has the same twin_id. `prompt_id` is the hash of twin_id plus everything that changes the
    answer's meaning (arm, backend, model, sampling settings, template variant), so an edited input
    is a new prompt (case C73) and duplicates meet.
    """

    prompt_id: str
    twin_id: str
    dataset: str
    messages: list[Message]
    tools: list[Tool] | None = None
    arm: Arm = "declared"
    backend: str = "openrouter"
    thinking: bool = True
    preserve_thinking: bool = False
    """The prompt keeps the thinking of turns that were answered."""
    source_row: int = 0
    renamed: dict[str, str] = {}
    """Function names that had to be changed to fit the target's call ids: as in the dataset -> as
    sent."""


class Sampling(Record, frozen=True, kw_only=True):
    temperature: float = 1.0
    top_p: float = 0.95
    max_tokens: int = 4096
    seed: int | None = None


class Usage(Record, frozen=True, kw_only=True):
    """What a reply was billed. None means not said (never zero). Token counts are the native
    tokenizer's.

    `cost_usd` is what the books get; `cap_usd` what counts against the budget (BYOK: upstream cost,
    case C40).
    """

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    reasoning_tokens: int | None = None
    cached_tokens: int | None = None
    cost_usd: float | None = None
    cap_usd: float | None = None


class Timings(Record, frozen=True, kw_only=True):
    """Seconds, from the moment the request left. `sent_at` is wall-clock (unix)."""

    sent_at: float
    total_s: float
    ttft_s: float | None = None


class Rollout(Record, frozen=True, kw_only=True):
    """One attempt's end: a line of completions.jsonl. A prompt is finished by a record whose
    outcome is final (`ok`, `rejected`, `failed`, `refused`); `aborted` leaves it pending.

    `reply_raw` is the body as received (ASCII-escaped JSON string on disk: lone surrogates and NULs
    survive); `reply_kind` says how to read it. A stream has `reply_zlib` instead; `reply_text`
    gives either. `request` is the body as sent, without secrets.
    """

    v: int = SCHEMA_VERSION
    prompt_id: str
    twin_id: str
    dataset: str
    arm: Arm
    attempt: int
    outcome: Outcome
    error_class: str | None = None
    error: str | None = None
    final: bool = True
    backend: str
    provider: str | None = None
    model: str | None = None
    generation_id: str | None = None
    request: dict[str, Any] = {}
    status: int | None = None
    headers: dict[str, str] = {}
    reply_kind: Literal["json", "sse", "none"] = "none"
    reply_raw: str | None = None
    reply_zlib: bytes | msgspec.UnsetType = msgspec.UNSET
    usage: Usage = Usage()
    bill: str = ""
    """How its cost was found: the kind of the spend line that closes it."""
    timings: Timings | None = None


class RolloutHead(msgspec.Struct, frozen=True, kw_only=True):
    """A line of completions.jsonl without request and reply, which the decoder passes over."""

    prompt_id: str
    attempt: int = 1
    backend: str = ""
    outcome: str
    error_class: str | None = None
    final: bool = True
    bill: str = ""
    usage: Usage = Usage()


class Kept(Protocol):
    """What is needed of a record to read its reply."""

    @property
    def reply_raw(self) -> str | None: ...
    @property
    def reply_zlib(self) -> bytes | msgspec.UnsetType: ...


def pack_reply(stream: bytes) -> bytes:
    """A stream of 2,000 tokens is 730 kB, of which most is said again in every event: 17 kB at
    zlib's fastest level, in 0.9 ms (level 6: 12 kB in 2.0 ms)."""
    return zlib.compress(stream, 1)


def reply_text(record: Kept) -> str | None:
    """The reply as received, whichever way it is kept; bytes that are no UTF-8 as lone surrogates.
    Damaged packing gives an empty text, which is judged as a stream that was cut off."""
    if record.reply_zlib is msgspec.UNSET:
        return record.reply_raw
    try:
        return zlib.decompress(record.reply_zlib).decode("utf-8", "surrogateescape")
    except zlib.error:
        return ""


class ToolCall(Record, frozen=True, kw_only=True):
    """`arguments` is the string as sampled, byte for byte (case C58)."""

    id: str
    name: str
    arguments: str


class Segment(Record, frozen=True, kw_only=True):
    """A run of completion ids with one meaning: `reasoning`, `marker`, `content`, `call_id`,
    `arguments`, `end`."""

    kind: str
    start: int
    end: int


class Sample(Record, frozen=True, kw_only=True):
    """prompt ids + completion ids of one rollout, with the verdict and its evidence.

    `token_ids` = prompt then completion; the loss mask is True exactly on positions >= prompt_len
    (`loss_mask` below), less the `masked` ones. A rejected rollout has the ids that could be built,
    or none, and is never trained on.
    """

    v: int = SCHEMA_VERSION
    sample_id: str
    prompt_id: str
    twin_id: str
    dataset: str
    arm: Arm
    backend: str
    provider: str | None
    token_ids: list[int]
    prompt_len: int
    verdict: Verdict
    error_class: str | None = None
    hypothesis: str | None = None
    flags: list[str] = []
    calls: list[ToolCall] = []
    segments: list[Segment] = []
    finish_reason: str | None = None
    rebuilt_tokens: int | None = None
    billed_tokens: int | None = None
    prompt_tokens_billed: int | None = None
    cost_usd: float | None = None
    masked: list[int] = []
    """Positions of `token_ids` that an applied audit took out of the loss."""
    dropped: str = ""
    """Why an applied audit took the whole sample out of training; empty: it did not."""
    reasoning_off: int | None = None
    """Reasoning tokens as reported minus as rebuilt; None where none are reported."""
    habits: dict[str, bool] = {}
    """Ways of writing that a provider might take away, and whether the reply shows them."""

    @property
    def completion_ids(self) -> list[int]:
        return self.token_ids[self.prompt_len :]

    @property
    def loss_mask(self) -> list[bool]:
        masked = set(self.masked)
        return [i >= self.prompt_len and i not in masked for i in range(len(self.token_ids))]

    @property
    def trainable(self) -> bool:
        return self.verdict in TRAINABLE and not self.dropped


class Finding(Record, frozen=True, kw_only=True):
    """One audit remark about one sample. `severity`: info | warn | error.

    `spans`: the runs of `token_ids` positions that it is about; empty: the sample as a whole.
    """

    v: int = SCHEMA_VERSION
    sample_id: str
    rule: str
    detail: str
    severity: Literal["info", "warn", "error"] = "warn"
    dataset: str = ""
    provider: str | None = None
    spans: list[tuple[int, int]] = []


class SpendLine(Record, frozen=True, kw_only=True):
    """A line of spend.jsonl, the books. Sum of `cost_usd` over all lines = spend (kinds other than
    `billed`, `looked_up`, `uncertain` and `adjusted` have none).

    dispatch   a request is about to leave; `reserve_usd` is its worst case
    known      its generation id
    billed     usage came with the reply
    looked_up  settled through /generation (`billed` for a cancelled or lost reply)
    uncertain  could not be settled: the worst case is booked and stays marked
    free       the provider charges nothing (error before the first token, local server)
    account    what the backend's account had been billed before the run's first request
               (`account_usd`), once a run
    adjusted   a correction, mostly negative: the account's total proved what all uncertain ones
               up to this line cost together
    Exactly one of billed | looked_up | uncertain | free closes a dispatch (key: prompt_id,
    attempt); `account` and `adjusted` belong to no prompt (empty id, attempt 0).
    """

    v: int = SCHEMA_VERSION
    ts: float
    kind: Literal[
        "dispatch", "known", "billed", "looked_up", "uncertain", "free", "account", "adjusted"
    ]
    prompt_id: str
    attempt: int
    backend: str
    provider: str | None = None
    generation_id: str | None = None
    reserve_usd: float = 0.0
    cost_usd: float = 0.0
    cap_usd: float = 0.0
    account_usd: float | None = None


UNJUDGED = "awaits_judge"
"""Class of a reply that was stored before its verdict; the next line of its prompt has that."""
CLOSING = frozenset({"billed", "looked_up", "uncertain", "free"})
"""Kinds of spend lines that close a dispatch."""


class FeatureRef(Record, frozen=True, kw_only=True):
    """Where one sample's hidden states are; never the states themselves. `sha256` covers the stored
    bytes, `ids_crc` the ids: a sample that was asked again or rebuilt has others."""

    sample_id: str
    dataset: str
    shard: str
    num_tokens: int
    prompt_len: int
    twin_id: str = ""
    supervised: int = 0
    sha256: str = ""
    ids_crc: int = 0


SERVED_SHARE = 0.8
"""Really decoding below this share of the walk's acceptance length is a fault of serving, not of
training (case C69)."""


class AcceptanceCounts(Record, frozen=True, kw_only=True):
    """Counts first, ratios last. `accepted_by_position[i]`: steps whose first i+1 drafts were all
    right."""

    steps: int
    tokens: int
    accepted_by_position: list[int]
    offered_by_position: list[int]

    @property
    def acceptance_length(self) -> float:
        """Tokens per target forward, bonus token included."""
        return self.tokens / self.steps if self.steps else 0.0


class EvalReport(Record, frozen=True, kw_only=True):
    """`walk` is the exact offline walk, `decoded` the count from really decoding with the drafter.

    `walk_text` says which text was walked: `greedy` (the target's own greedy replies to `prompts`
    held-out prompts, the same that were decoded, so the two figures are comparable) or `recorded`
    (the held-out samples as generated, when nothing is decoded). `recorded` is the walk over all
    held-out samples, whichever `walk` is.
    """

    v: int = SCHEMA_VERSION
    checkpoint: str
    draft_tokens: int
    prompts: int
    walk: AcceptanceCounts
    walk_text: Literal["greedy", "recorded"] = "greedy"
    recorded: AcceptanceCounts | None = None
    recorded_by_dataset: dict[str, AcceptanceCounts] = {}
    by_length: dict[str, AcceptanceCounts] = {}
    decoded: AcceptanceCounts | None = None
    untrained: AcceptanceCounts | None = None
    lossless_prompts: int | None = None
    by_dataset: dict[str, AcceptanceCounts] = {}
    coverage_by_dataset: dict[str, float] = {}
    unique_4gram_ratio: float | None = None
