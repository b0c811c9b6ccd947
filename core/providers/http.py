"""One aiohttp session per backend, and one exchange over it: bytes into a Flight, every accident a
Failure.

Promises: the connector never queues (its limit is off, the dispatch gate is the only one), so a
wait for a slot is never a timeout (case C43); no library retry below ours; running out of
descriptors is our own fault and said so (case C41). Knows bytes and sockets, nothing of models."""

import asyncio
import contextlib
import errno
import os
import resource
from types import SimpleNamespace
from typing import Any

import aiohttp
import msgspec

from core.errors import ProviderError
from core.providers import base
from core.providers.classify import UNREADABLE, kept_headers, parse_json
from core.providers.secrets import Secrets
from core.providers.stream import collect_events
from core.schema import pack_reply

FDS_KEPT_BACK = 64
DNS_CACHE_S = 300
KEEPALIVE_S = 75.0
MAX_CONTROL_BYTES = 32 << 20
"""OpenRouter's list of all models, the longest answer that is asked for, has 1.5 MB."""
CONTROL_TIMEOUT = aiohttp.ClientTimeout(total=20.0)


def raise_fd_limit() -> int:
    """Lift the soft limit to the hard one. Returns how many requests may be open: soft - 64 (case
    C41)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft == resource.RLIM_INFINITY:
        return 1 << 20
    return max(1, soft - FDS_KEPT_BACK)


async def _headers_sent(session: Any, context: SimpleNamespace, params: Any) -> None:
    flight = context.trace_request_ctx
    if flight is not None:
        flight.left(asyncio.get_running_loop().time())


def _in_words(error: BaseException) -> str:
    """An accident for people: of a host that was not reached, without aiohttp's call frames."""
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "no address is known for this host"
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, aiohttp.ClientConnectorSSLError):  # its errno is none of the system's
        return f"no TLS: {getattr(error.os_error, 'reason', '') or error.os_error}"
    number = error.os_error.errno if isinstance(error, aiohttp.ClientConnectorError) else None
    if number is not None and number > 0:
        return os.strerror(number).lower()
    return " ".join(f"{type(error).__name__}: {error}".split())


def _transport_failure(error: BaseException, flight: base.Flight) -> base.Failure:
    """An exception of aiohttp or the system -> the class that says how far the request came."""
    text = flight.secrets.hide(_in_words(error))[:200]
    number = getattr(error, "errno", None) or getattr(
        getattr(error, "os_error", None), "errno", None
    )
    if number in (errno.EMFILE, errno.ENFILE):
        return base.LocalEmfile(f"{text}; raise `ulimit -n`")
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        return base.ConnectFailed(text)
    if isinstance(error, aiohttp.ClientResponseError):  # an answer whose head cannot be read
        return base.ConnectionCut(text)
    if flight.status is None:
        if flight.left_at is None and not isinstance(error, aiohttp.ServerDisconnectedError):
            return base.ConnectFailed(text)
        return base.ConnectionLost(text)
    if flight.kind == "sse":
        return base.StreamIncomplete(text)
    if not flight.received:
        return base.ConnectionCut(text)
    return base.BodyTruncated(text)


class HttpClient:
    """Session, base URL and headers of one backend. Created inside a running loop, closed with
    it."""

    def __init__(self, base_url: str, headers: dict[str, str], connect_timeout_s: float) -> None:
        self.base_url = base_url.rstrip("/")
        keys = [
            v.removeprefix("Bearer ") for n, v in headers.items() if n.lower() == "authorization"
        ]
        self._secrets = Secrets(keys)
        trace = aiohttp.TraceConfig()
        trace.on_request_headers_sent.append(_headers_sent)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0,
                limit_per_host=0,
                ttl_dns_cache=DNS_CACHE_S,
                keepalive_timeout=KEEPALIVE_S,
            ),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s),
            headers={"Content-Type": "application/json", **headers},
            trace_configs=[trace],
            auto_decompress=True,
            cookie_jar=aiohttp.DummyCookieJar(),
            read_bufsize=1 << 18,
        )

    def clean(self, reply: base.Reply) -> base.Reply:
        """A reply without any secret. A stream is packed here, as soon as it has none."""
        hide, raw, failure = self._secrets.hide, reply.raw, reply.failure
        if failure is not None and (words := hide(str(failure))) != str(failure):
            failure.args = (words,)
        if isinstance(raw, bytes):
            raw = pack_reply(self._secrets.hide_raw(raw))
        return msgspec.structs.replace(
            reply,
            raw=hide(raw) if isinstance(raw, str) else raw,
            provider=reply.provider and hide(reply.provider),
            model=reply.model and hide(reply.model),
            generation_id=reply.generation_id and hide(reply.generation_id),
        )

    async def exchange(
        self, path: str, body: dict[str, Any], flight: base.Flight
    ) -> base.Failure | None:
        """POST, and collect the reply into `flight`. Returns what the transport did wrong."""
        data = msgspec.json.encode(body)
        flight.secrets = self._secrets
        try:
            async with self._session.post(
                self.base_url + path, data=data, trace_request_ctx=flight, allow_redirects=False
            ) as reply:
                now = asyncio.get_running_loop().time()
                flight.left(now)
                flight.status = reply.status
                hide = self._secrets.hide
                flight.headers = kept_headers({n: hide(v) for n, v in reply.headers.items()})
                streamed = "text/event-stream" in reply.headers.get("Content-Type", "")
                flight.kind = "sse" if streamed and reply.status < 400 else "json"
                flight.known(reply.headers.get("X-Generation-Id"))
                await self._collect(reply, flight)
        except (aiohttp.ClientError, OSError, asyncio.IncompleteReadError) as error:
            return _transport_failure(error, flight)
        except base.Failure as failure:
            return failure
        return None

    async def _collect(self, reply: aiohttp.ClientResponse, flight: base.Flight) -> None:
        if flight.kind == "sse":
            await collect_events(reply.content, flight)
            return
        clock = asyncio.get_running_loop().time
        async for chunk in reply.content.iter_any():
            flight.take(chunk)
            flight.last_at = clock()
        flight.received[:] = self._secrets.hide_raw(bytes(flight.received))

    async def get(self, path: str, **params: str) -> tuple[int, Any]:
        """(status, JSON or None). Raises ProviderError when nothing answers."""
        return await self._control("GET", path, None, params)

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        return await self._control("POST", path, body, {})

    async def text(self, path: str) -> tuple[int, str]:
        status, raw = await self._raw("GET", path, None, {})
        return status, raw.decode("utf-8", "replace")

    async def _control(
        self, method: str, path: str, body: dict[str, Any] | None, params: dict[str, str]
    ) -> tuple[int, Any]:
        status, raw = await self._raw(method, path, body, params)
        try:
            return status, parse_json(raw)
        except UNREADABLE:
            return status, None

    async def _raw(
        self, method: str, path: str, body: dict[str, Any] | None, params: dict[str, str]
    ) -> tuple[int, bytes]:
        try:
            async with self._session.request(
                method,
                self.base_url + path,
                params=params or None,
                data=None if body is None else msgspec.json.encode(body),
                timeout=CONTROL_TIMEOUT,
                trace_request_ctx=None,
                allow_redirects=False,
            ) as reply:
                answer = bytearray()
                async for chunk in reply.content.iter_any():
                    answer += chunk
                    if len(answer) > MAX_CONTROL_BYTES:
                        raise ProviderError(
                            f"{self.base_url}{path}: an answer of more than {MAX_CONTROL_BYTES} "
                            "bytes; is the URL that of a model server?",
                            "reply_too_large",
                        )
                return reply.status, self._secrets.hide_raw(bytes(answer))
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            if isinstance(error, aiohttp.InvalidURL | aiohttp.NonHttpUrlClientError):
                raise ProviderError(
                    f"{self.base_url}: not a URL that can be asked; write http://... or https://...",
                    "unreachable",
                ) from error
            said = self._secrets.hide(_in_words(error))[:200]
            raise ProviderError(
                f"{self.base_url}{path}: no answer ({said}); is the server up and the URL right?",
                "unreachable",
            ) from error

    async def close(self) -> None:
        await self._session.close()
