"""What every backend is to generate: one call that ends in a Reply, and the classes of everything
that can go wrong.

Promises: a failure is classified once, by status, headers, body and transport, and carries whether
it may be retried and whether it may have been paid for. Retries themselves belong to generate.
Knows no budget and no clock.

    Failure (a ProviderError) ├── Throttled        everyone waits: RateLimited (429), Unavailable
    (503, 529) ├── PaymentRequired  402: the balance does not cover what is open ├── Fatal
    the same for every request: KeyRefused (401), Forbidden (403), NotServed (404) ├── Refused
    the same for this prompt: BadRequest (400, 413, 422), Moderated (403 with reasons) ├── NotSent
    it never left: ConnectFailed, LocalEmfile ├── Broken ServerError (5xx, 408), ConnectionLost,
    timeouts, cut streams and bodies, UpstreamError └── EmptyChoices     billed, and nothing in it
"""

from collections.abc import Callable
from typing import Any, ClassVar, Literal, Protocol

import msgspec

from core.errors import ProviderError
from core.providers.price import Price
from core.providers.secrets import NO_SECRETS
from core.render.tokenizer import TokenizerLike
from core.schema import Prompt, Sampling, Usage

Paid = Literal["no", "insured", "maybe"]


class Failure(ProviderError):
    """One attempt's failure. `kind` is the outcome class; `paid` says whether a bill may exist that
    nobody has shown."""

    error_class: ClassVar[str] = "failed"
    paid: ClassVar[Paid] = "no"

    def __init__(self, message: str, kind: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(message, kind or self.error_class)
        self.retry_after_s = retry_after_s


class Throttled(Failure):
    """`platform`: the account's own limit, not one provider's; every provider of the backend
    waits."""

    platform = False


class RateLimited(Throttled):
    error_class = "rate_limited"


class Unavailable(Throttled):
    error_class = "provider_unavailable"


class PaymentRequired(Failure):
    error_class = "payment_required"


class Fatal(Failure):
    pass


class KeyRefused(Fatal):
    error_class = "key_refused"


class Forbidden(Fatal):
    error_class = "forbidden"


class NotServed(Fatal):
    error_class = "not_served"


class Refused(Failure):
    pass


class BadRequest(Refused):
    error_class = "bad_request"


class Moderated(Refused):
    error_class = "moderated"


class NotSent(Failure):
    pass


class ConnectFailed(NotSent):
    error_class = "connect_failed"


class LocalEmfile(NotSent):
    error_class = "local_emfile"


class Broken(Failure):
    paid: ClassVar[Paid] = "maybe"


class ServerError(Broken):
    error_class = "server_error"
    paid = "no"


class GatewayTimeout(Broken):
    """408, 504, 524: somebody in between gave up waiting; whoever was working may still bill."""

    error_class = "gateway_timeout"


class ConnectionLost(Broken):
    """Before any header: nothing was accepted, a retry is free (case C38)."""

    error_class = "connection_lost"
    paid = "no"


class ConnectionCut(Broken):
    """After the headers: accepted, so perhaps billed."""

    error_class = "connection_lost"


class FirstEventTimeout(Broken):
    error_class = "first_event_timeout"


class StreamIdle(Broken):
    error_class = "stream_idle_timeout"


class TotalTimeout(Broken):
    error_class = "total_timeout"


class StreamIncomplete(Broken):
    error_class = "stream_incomplete"


class BodyTruncated(Broken):
    error_class = "body_truncated"


class ReplyTooLarge(Broken):
    """More bytes than any completion of this length has (`most_bytes`): read no further."""

    error_class = "reply_too_large"


class BodyNotJson(Broken):
    error_class = "body_not_json"


class UpstreamError(Broken):
    """An error inside a 200, before or in the middle of the reply. OpenRouter does not bill what
    finishes so (zero-completion insurance): a bill is looked for, and none found means none."""

    error_class = "upstream_error_midstream"
    paid: ClassVar[Paid] = "insured"


class EmptyChoices(Failure):
    error_class = "empty_choices"
    paid = "maybe"


RETRYABLE: tuple[type[Failure], ...] = (
    Throttled, PaymentRequired, Fatal, NotSent, Broken, EmptyChoices
)  # fmt: skip
"""The only list of what may be sent again; Fatal ones elsewhere, or not at all once their provider
is stopped. How often is generate's business."""

RETRYABLE_REPLIES = frozenset({"finish_missing", "empty_choices", "empty_completion"})
"""Rejections of a whole, judged reply that a second one may mend (one paid retry, cases C27 and
C30). Truncation, structure and semantics are data, not accidents: they are never asked again
blindly."""


NAME_CHARS = 256
LEAST_LIMIT_BYTES = 16 << 20
KEPT_OF_TOO_LARGE = 1 << 20
BYTES_A_TOKEN = 2_048
"""A stream's event for one token has some 400 bytes round it, and no token's text is longer than
128 bytes; half of this is generous."""


def most_bytes(max_tokens: int) -> int:
    """Of a reply's body, after decompression, that are read."""
    return LEAST_LIMIT_BYTES + BYTES_A_TOKEN * max_tokens


def name_in(value: Any) -> str | None:
    """An id, provider or model as a server wrote it. What is longer than any name is none: it would
    be in every line about its reply."""
    return value if isinstance(value, str) and 0 < len(value) <= NAME_CHARS else None


class Advice(str):
    """A line of a pre-flight that somebody should act on."""

    __slots__ = ()


class CompletionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`prompt_ids` is our rendering; `provider` the one that is pinned, None: the backend's
    choice."""

    request_id: str
    prompt: Prompt
    prompt_ids: list[int]
    sampling: Sampling
    provider: str | None = None
    session: str = ""


class Flight:
    """What is known of one request while it is away. Written by the provider, read by generate at
    any moment.

    Times are the loop's clock; `left_at` is when the request was on the wire, so that neither a
    slot nor a connection is ever part of a timeout (case C43)."""

    __slots__ = (
        "body",
        "comments",
        "counted",
        "events",
        "failure",
        "first_at",
        "generation_id",
        "headers",
        "kind",
        "last_at",
        "left_at",
        "most_bytes",
        "on_generation",
        "provider",
        "received",
        "secrets",
        "status",
        "tokens",
    )

    def __init__(
        self,
        on_generation: Callable[["Flight"], None] | None = None,
        max_tokens: int = 0,
    ) -> None:
        self.most_bytes = most_bytes(max_tokens)
        self.left_at: float | None = None
        self.first_at: float | None = None
        self.last_at: float | None = None
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.kind: Literal["json", "sse", "none"] = "none"
        self.received = bytearray()
        self.events = 0
        self.tokens = 0
        """That a stream has brought: by its own count or ids, where it shows them, else one an
        event."""
        self.comments = 0
        self.counted = 0
        self.generation_id: str | None = None
        self.provider: str | None = None
        self.body: dict[str, Any] = {}
        self.failure: Failure | None = None
        self.on_generation = on_generation
        self.secrets = NO_SECRETS
        """What its server must not be believed to have said."""

    @property
    def whole(self) -> bool:
        """Whether a stream has brought its whole answer and bill: nothing but its end is
        missing."""
        return {"finish_reason", "usage"} <= self.body.keys() and "error" not in self.body

    def left(self, now: float) -> None:
        if self.left_at is None:
            self.left_at = now

    def take(self, chunk: bytes) -> None:
        """Keep what has arrived. Raises ReplyTooLarge, with the beginning kept: what names the bill
        stands there."""
        self.received += chunk
        if len(self.received) > self.most_bytes:
            size = len(self.received)
            del self.received[KEPT_OF_TOO_LARGE:]
            raise ReplyTooLarge(f"more than {size} bytes and no end; read no further")

    def known(self, generation_id: str | None) -> None:
        if self.generation_id is None and (generation_id := name_in(generation_id)):
            self.generation_id = self.secrets.hide(generation_id)
            if self.on_generation:
                self.on_generation(self)


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one attempt. `failure` None: a whole reply, to be judged."""

    request: dict[str, Any]
    status: int | None = None
    headers: dict[str, str] = {}
    kind: Literal["json", "sse", "none"] = "none"
    raw: str | bytes | None = None
    """A stream's is bytes, packed by `HttpClient.clean`: as text, one emoji would make it four
    times as large."""
    provider: str | None = None
    model: str | None = None
    generation_id: str | None = None
    usage: Usage = Usage()
    failure: Failure | None = None


class LookedUp(msgspec.Struct, frozen=True, kw_only=True):
    """What /generation says of one id."""

    cost_usd: float
    cap_usd: float
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    provider: str | None = None


class LaneSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One provider that preflight found fit: what it charges and what it can do.

    `display`: the name under which replies call it. `cancel_stops_bill`: an aborted stream is not
    billed further. `rank`: lower is preferred."""

    name: str
    price: Price = Price()
    rank: float = 0.0
    display: str = ""
    cancel_stops_bill: bool = False
    note: str = ""
    context_tokens: int | None = None
    """Most tokens of a prompt and its answer together; None: not said."""

    def holds(self, tokens: int) -> bool:
        return self.context_tokens is None or tokens <= self.context_tokens


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """A server's own queue."""

    running: int
    waiting: int


class Provider(Protocol):
    """One backend. `complete` returns a Reply for everything that the other side did; it raises
    only CancelledError (what had arrived stays in the Flight) and programming errors."""

    name: str
    lanes: list[LaneSpec]
    streams: bool
    """Replies arrive as event streams: the clocks of a stream apply."""
    sends_messages: bool
    """The server renders the messages; otherwise it gets our ids."""
    tells_bills: bool
    """A look-up may find the bill of a generation; otherwise nobody waits for one."""

    async def preflight(
        self, sampling: Sampling, tokenizer: TokenizerLike | None = None, tools: bool = False
    ) -> list[str]:
        """Check the server against the config before the first paid request; fill `lanes`; lines
        for the log, of which those to act on are Advice. `tokenizer`: the run's own, for servers
        that show theirs. `tools`: some prompts declare them."""

    async def complete(self, request: CompletionRequest, flight: Flight) -> Reply: ...

    def partial(self, request: CompletionRequest, flight: Flight) -> Reply:
        """What a cancelled request had brought."""

    async def lookup(self, generation_id: str) -> LookedUp | None:
        """The bill of one generation; None: not to be found (now, or at all). Raises KeyRefused
        where no bill will be told."""

    async def account_usd(self) -> float | None:
        """What the account has been billed in all its life; None: there is none, or it does not
        say."""

    async def abort(self, request: CompletionRequest) -> None:
        """Tell the server to drop a request that was cancelled here."""

    async def load(self, lane: str) -> Load | None: ...

    async def close(self) -> None: ...
