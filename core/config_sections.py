"""The sections of a config. Every field is documented where it is declared.

Secrets are names of environment variables, never values.
"""

from typing import Annotated, Literal

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Seed = Annotated[int, msgspec.Meta(ge=0, le=2**53)]  # NumPy takes no negative one
Seconds = Annotated[float, msgspec.Meta(gt=0)]
Usd = Annotated[float, msgspec.Meta(ge=0, le=1e9)]  # worst cases divide it, as whole numbers
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Backend = Literal["openrouter", "sglang", "vllm", "openai"]
Device = Annotated[str, msgspec.Meta(pattern=r"^(cpu|mps|(cuda|xpu|npu|hpu)(:\d+)?)$")]
Cutoffs = Usd | dict[Literal["p50", "p75", "p90", "p99"], Usd]
"""A number (the median's) or one for each percentile; 0: none."""


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every section."""


class Run(Section, frozen=True, kw_only=True):
    dir: str = "runs"
    """Folder that holds the run directories."""
    name: str = ""
    """Run id; empty: made from date and time."""
    seed: Seed = 0
    budget_usd: Usd = 10.0
    """Spend never passes this: spent + the worst case of everything in flight stays below it."""
    min_free_disk_bytes: Count = 1 << 30
    """Refuse to start, and halt, below this much free space."""
    stages: list[
        Literal[
            "generate", "reconstruct", "audit", "vocab", "extract", "train", "evaluate", "export"
        ]
    ] = []
    """Stages to run, in their own order; empty: all."""


class Target(Section, frozen=True, kw_only=True):
    kind: Literal["embedded", "hf"] = "embedded"
    """`embedded`: the small model that ships with eyas, served by its own gateway. `hf`: a model
    directory."""
    path: str = ""
    """Model directory for extraction (config.json, safetensors). Empty with `embedded`."""
    tokenizer: str = ""
    """Directory with tiktoken.model and tokenizer_config.json, or a chat-template tokenizer, or a
    hub's `owner/name[@revision]`. Empty with `embedded`."""
    download: bool = False
    """Fetch the tokenizer's data files from the hub when they are not in its local cache."""
    variant: Literal["kimi-k2", "kimi-k2-thinking", "kimi-k2.5", "kimi-k2.6", "template"] = (
        "kimi-k2.5"
    )
    """Which chat template's rules the renderer follows."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: Device = "cpu"
    """Torch device for the extract stage, e.g. "cuda" or "cuda:1"."""


class Dataset(Section, frozen=True, kw_only=True):
    name: str
    kind: Literal[
        "messages",
        "embedded",
        "glaive",
        "opencode",
        "magicoder",
        "mot",
        "nemotron",
        "swesmith",
        "xlam",
        "toolace",
    ] = "messages"
    """Format of the rows. `messages`: {"messages": [...], "tools"?: [...], "thinking"?: bool} a
    line."""
    path: str = ""
    """JSONL file. Empty with `embedded`, whose prompts come from the built-in corpus."""
    families: list[str] = []
    """`embedded` only: corpus families to take; empty: all."""
    limit: Count = 0
    """Prompts to take; 0: all."""
    arm: Literal["local", "declared", "text"] = "declared"
    """local: token ids from a local server. declared: API with `tools`. text: tools described in
    the system message."""
    backend: Backend = "openrouter"
    twins: Count = 0
    """Ask this many of the dataset's prompts through the local arm as well (same seed): the
    reference of the audit."""
    thinking: bool = True
    preserve_thinking: bool = False
    """Keep the thinking of answered turns in the prompt; for templates that know it (kimi-k2.6) on
    servers that take `chat_template_kwargs`."""


class OpenRouter(Section, frozen=True, kw_only=True):
    base_url: str = ""
    """Empty: https://openrouter.ai/api/v1, or with target.kind = "embedded", whose tokens nobody
    else speaks, the gateway that the run starts."""
    api_key_env: str = "OPENROUTER_API_KEY"
    """NAME of the environment variable that holds the key."""
    model: str = "moonshotai/kimi-k2.5"
    only: list[str] = []
    ignore: list[str] = []
    order: list[str] = []
    quantizations: list[
        Literal[
            "int4", "int8", "fp4", "mxfp4", "nvfp4", "fp6", "fp8", "mxfp8", "fp16", "bf16", "fp32",
            "unknown",
        ]
    ] = []  # fmt: skip
    sort: Literal["", "price", "throughput", "latency"] = ""
    """Which provider is preferred. OpenRouter's `exacto` re-orders providers for each request; here
    each request names its own."""
    preferred_min_throughput: Cutoffs = 0.0
    """Tokens per second. Slower providers come after all others, and are not left out."""
    preferred_max_latency: Cutoffs = 0.0
    """Seconds to the first token; likewise."""
    require_parameters: bool = True
    allow_fallbacks: bool = False
    max_price_prompt: Usd = 0.0
    """USD per million prompt tokens, hard; 0: no limit."""
    max_price_completion: Usd = 0.0
    max_price_request: Usd = 0.0
    """USD per request; likewise hard."""
    max_price_image: Usd = 0.0
    """USD per image; eyas sends none, a provider that charges more is left out all the same."""
    reasoning_effort: Literal["", "minimal", "low", "medium", "high", "xhigh", "max"] = ""
    """How long prompts with thinking may think; empty: the model's own measure."""
    reasoning_max_tokens: Count = 0
    """The same as a number of tokens; 0: no limit but max_tokens."""
    data_collection: Literal["allow", "deny"] = "deny"
    zdr: bool = False
    enforce_distillable_text: bool = True
    stream: bool = True
    """Streaming is what makes a cancelled request cheap on providers that support it."""
    cancellable: list[str] = []
    """Further providers, by slug, whose bill stops when a stream is closed (known ones are built
    in)."""
    app_url: str = ""
    """Sent as HTTP-Referer: the page under which OpenRouter lists what this key was used for."""


class SGLang(Section, frozen=True, kw_only=True):
    urls: list[str] = []
    """Server base URLs; empty with target.kind = "embedded"."""
    api_key_env: str = ""
    model: str = ""
    """What the servers must serve (served name, model path or its last part); empty: shown, not
    checked. Their tokenizer is compared with the run's own in any case."""
    endpoint: Literal["generate", "chat"] = "generate"
    """`generate` sends our own prompt ids (exact by construction); `chat` asks for
    return_token_ids."""
    stream: bool = True
    """Live tokens, time to first token, stalls seen, and what a halt cuts off is kept. Replies of
    `chat` come whole all the same: SGLang streams no ids there. Long replies take much less traffic
    from a server with --incremental-streaming-output; others repeat the whole in each event."""


class OpenAI(Section, frozen=True, kw_only=True):
    """vLLM and any other OpenAI-compatible server."""

    base_url: str = ""
    api_key_env: str = ""
    model: str = ""
    price_prompt: Usd = 0.0
    """USD per million tokens, for servers that bill."""
    price_completion: Usd = 0.0
    free: bool = False
    """Says that a server on a public host bills nothing, so that prices of 0 are meant."""
    stream: bool = True
    """Where the probe shows that token ids come in streams too (vLLM), which costs nothing then;
    replies of other servers come whole."""


class Generate(Section, frozen=True, kw_only=True):
    max_in_flight: Annotated[int, msgspec.Meta(ge=1, le=20_000)] = 2_000
    """Requests open at once. Above ~1,000, raise the file limit first (ulimit -n)."""
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.95
    max_tokens: Positive = 16_384
    connect_timeout_s: Seconds = 15.0
    first_event_timeout_s: Seconds = 300.0
    """From the request's departure to its first data; a wait for a slot never counts, nor one in
    the queue of a local server that is at work."""
    idle_timeout_s: Seconds = 300.0
    """Between data events of a stream; keep-alive comments do not reset it."""
    total_timeout_s: Seconds = 1_800.0
    attempts_unpaid: Positive = 8
    """Tries per prompt that cost nothing (5xx, lost connections). 429 and 503 are waits, not
    tries."""
    attempts_paid: Positive = 2
    """Tries per prompt that were, or may have been, paid for."""
    canary: Count = 32
    """Rollouts per provider and dataset that must pass before full concurrency; 0: off."""
    patience_s: Seconds = 1_800.0
    """A provider that has given nothing but throttling and failures for this long is given up."""
    patience_at_start_s: Seconds = 180.0
    """So is a whole backend that has failed for this long without one answer since the start."""
    reserve: Literal["worst_case", "p99", "all"] = "worst_case"
    """What a request in flight holds of the budget: its worst case (the bill cannot pass the
    budget), or the running p99 of answer lengths (more in flight near the end; the most it can
    overshoot is shown). `all`: worst cases, and nothing is sent unless those of all prompts fit."""
    breaker_error_rate: Share = 0.5
    """Error share of the last 100 attempts above which the breaker of a provider opens."""
    openrouter: OpenRouter = OpenRouter()
    sglang: SGLang = SGLang()
    openai: OpenAI = OpenAI()


class Audit(Section, frozen=True, kw_only=True):
    alpha: Share = 0.001
    """Two-sided level of the semantics tests."""
    min_pairs: Positive = 30
    """Fewer paired samples than this: no decision."""


class Tripwires(Section, frozen=True, kw_only=True):
    min_samples: Positive = 32
    """No rate is judged on fewer."""
    mismatch_rate: Share = 0.05
    truncation_rate: Share = 0.25
    leak_rate: Share = 0.02
    error_rate: Share = 0.5
    schema_invalid_rate: Share = 0.10
    prompt_drift_rate: Share = 0.05
    """Share of replies whose prompt_tokens lie outside [ours, ours + 3]."""
    trigger_alpha: Share = 0.001
    """Two-sided level for the tool-trigger rate against the reference arm."""
    cost_per_kept_token_factor: Annotated[float, msgspec.Meta(gt=0)] = 3.0
    """Times the price-list cost of one completion token."""
    enabled: bool = True


class Extract(Section, frozen=True, kw_only=True):
    aux_layers: list[int] = []
    """0-based layers whose OUTPUT is taken; empty: [1, n//2-1, n-4]."""
    batch_tokens: Positive = 8_192
    shard_bytes: Positive = 256 << 20
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    max_length: Positive = 4_096
    """Longer samples are cut, ids and mask together (case C62)."""


class Draft(Section, frozen=True, kw_only=True):
    vocab_size: Count = 32_768
    """Draft vocabulary D; 0: the target's whole vocabulary."""
    intermediate_size: Count = 0
    """0: the target's."""
    num_heads: Count = 0
    num_kv_heads: Count = 0
    rope_theta: Count = 0
    max_position_embeddings: Count = 0


class Train(Section, frozen=True, kw_only=True):
    ttt_steps: Positive = 7
    """K."""
    loss_decay: Share = 0.8
    mask_align: Literal["serving", "target", "legacy"] = "serving"
    normalise: Literal["valid", "all"] = "valid"
    lr: Annotated[float, msgspec.Meta(gt=0)] = 1e-4
    warmup_ratio: Share = 0.015
    schedule: Literal["cosine", "constant"] = "cosine"
    weight_decay: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    clip: Annotated[float, msgspec.Meta(gt=0)] = 0.5
    batch_tokens: Positive = 8_192
    epochs: Positive = 1
    max_steps: Count = 0
    """0: epochs decide."""
    checkpoint_every: Positive = 500
    keep_checkpoints: Positive = 3
    device: Device = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: Count = 0
    """Torch CPU threads; 0: torch's choice."""


class Eval(Section, frozen=True, kw_only=True):
    draft_tokens: Positive = 3
    holdout: Share = 0.1
    """Share of prompts (by hash of twin_id, so that twins stay together) kept out of training."""
    decode_prompts: Count = 32
    """Held-out prompts that are really decoded with the drafter; 0: only the walk."""
    max_new_tokens: Positive = 256


class Export(Section, frozen=True, kw_only=True):
    engines: list[Literal["sglang", "vllm", "hf"]] = msgspec.field(
        default_factory=lambda: ["sglang", "vllm"]
    )


class Console(Section, frozen=True, kw_only=True):
    refresh_hz: Annotated[float, msgspec.Meta(gt=0, le=4)] = 2.0
    theme: str = "eyas-dark"
    low_bandwidth: bool = False
    ascii: bool = False


class Config(Section, frozen=True, kw_only=True):
    run: Run = Run()
    target: Target = Target()
    dataset: list[Dataset] = []
    generate: Generate = Generate()
    audit: Audit = Audit()
    tripwires: Tripwires = Tripwires()
    extract: Extract = Extract()
    draft: Draft = Draft()
    train: Train = Train()
    eval: Eval = Eval()
    export: Export = Export()
    console: Console = Console()
