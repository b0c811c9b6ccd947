"""Status, headers and body -> Failure or None. The one place where a reply's transport is judged.

Promises: an error in the body wins over a 200 (case C28); a cut body, an HTML page and an empty
choices list are told apart (C34, C30); messages never hold a secret or more than a few hundred
characters of foreign text. Pure."""

import email.utils
import json
from collections.abc import Mapping
from typing import Any

import msgspec

from core.providers import base
from core.providers.price import finite

MESSAGE_CHARS = 300
MAX_RETRY_AFTER_S = 3_600.0
BOM = "\ufeff"
BROKEN_OFF = ("error", "abort")
"""Finish reasons of a server that did not finish; vLLM and SGLang say `abort` when they are shut
down or told to drop it."""
UNREADABLE = (ValueError, RecursionError)
"""What parsing foreign JSON may raise. What the bill cannot be read from is judged with the
content."""
KEPT_HEADERS = frozenset(
    {"retry-after", "content-type", "x-generation-id", "x-request-id", "cf-ray", "date"}
)


def kept_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """The few headers worth a line on disk; never cookies, never anything of ours."""
    low = ((name.lower(), value) for name, value in headers.items())
    return {n: v[:200] for n, v in low if n in KEPT_HEADERS or n.startswith("x-ratelimit-")}


def parse_json(raw: bytes | bytearray | str) -> Any:
    """Any JSON value; raises ValueError, and RecursionError for deep nesting. Lone surrogate
    escapes, which msgspec refuses, are kept (case C52)."""
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        if isinstance(raw, bytes | bytearray):
            raw = raw.decode("utf-8", "surrogateescape")
        return json.loads(raw)


def retry_after_s(
    headers: Mapping[str, str], body: Mapping[str, Any], wall_now: float
) -> float | None:
    """Seconds from now: the header in its two forms (RFC 9110, 10.2.3; a date counts from the
    reply's own Date, so that clocks need not agree), the body's `availability.retry_after`, or the
    platform's reset time in milliseconds."""
    low = {name.lower(): value for name, value in headers.items()}
    text = low.get("retry-after", "").strip()
    value: Any = None
    if text:
        try:
            value = float(text)
        except ValueError:
            until, sent = _moment(text), _moment(low.get("date", ""))
            value = None if until is None else until - (wall_now if sent is None else sent)
    if value is None:
        error = body.get("error")
        availability = error.get("availability") if isinstance(error, dict) else None
        value = availability.get("retry_after") if isinstance(availability, dict) else None
    if value is None and (reset := low.get("x-ratelimit-reset", "")).isdecimal():
        value = int(reset) / 1000 - wall_now
    wait_s = finite(value)
    return None if wait_s is None else min(max(0.0, wait_s), MAX_RETRY_AFTER_S)


def _moment(text: str) -> float | None:
    """Unix seconds of an HTTP date."""
    try:
        return email.utils.parsedate_to_datetime(text).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None


def error_message(body: Any, fallback: str) -> str:
    """The other side's own words, provider and raw text included, cut to one short line."""
    error = body.get("error") if isinstance(body, dict) else None
    if isinstance(error, str):
        parts: list[Any] = [error]
    elif isinstance(error, dict):
        meta = error.get("metadata")
        meta = meta if isinstance(meta, dict) else {}
        parts = [error.get("message"), meta.get("provider_name"), meta.get("raw")]
    elif isinstance(body, dict):
        parts = [body.get("message"), body.get("detail")]
    else:
        parts = []
    text = ": ".join(p if isinstance(p, str) else str(p) for p in parts if p) or fallback
    return " ".join(text.split())[:MESSAGE_CHARS]


def classify_error(
    code: int, headers: Mapping[str, str], body: Any, wall_now: float
) -> base.Failure:
    """The failure of an error code, from a status line or from inside a body."""
    fields = body if isinstance(body, dict) else {}
    message = error_message(fields, f"HTTP {code}")
    wait_s = retry_after_s(headers, fields, wall_now)
    if code == 429:
        limited = base.RateLimited(message, retry_after_s=wait_s)
        limited.platform = _is_platform(fields)
        return limited
    if code in (503, 529):
        return base.Unavailable(message, retry_after_s=wait_s)
    if code == 402:
        return base.PaymentRequired(message, retry_after_s=wait_s)
    if code == 401:
        return base.KeyRefused(message)
    if code == 403:
        return base.Moderated(message) if _is_moderation(fields) else base.Forbidden(message)
    if code == 404:
        return base.NotServed(message)
    if code in (408, 504, 524):
        return base.GatewayTimeout(message)
    if 400 <= code < 500:
        return base.BadRequest(message)
    return base.ServerError(message)


def _metadata(body: Mapping[str, Any]) -> Mapping[str, Any]:
    error = body.get("error")
    meta = error.get("metadata") if isinstance(error, dict) else None
    return meta if isinstance(meta, dict) else {}


def _is_platform(body: Mapping[str, Any]) -> bool:
    """OpenRouter's own limit names no provider; `limit_source` says it outright where it is
    sent."""
    meta = _metadata(body)
    source = meta.get("limit_source")
    if isinstance(source, str):
        return source in ("platform", "openrouter", "account", "key")
    return bool(body.get("error")) and not meta.get("provider_name")


def _is_moderation(body: Mapping[str, Any]) -> bool:
    """A 403 about this prompt names who flagged it; one about the key does not."""
    meta = _metadata(body)
    return bool(meta.get("reasons") or meta.get("flagged_input") or meta.get("provider_name"))


def _choice_error(body: Mapping[str, Any]) -> Any:
    """The error of a choice, or words for a finish reason that says `error`."""
    choices = body.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict):
            if error := choice.get("error"):
                return error
            if (finish := choice.get("finish_reason")) in BROKEN_OFF:
                return {"message": f"finish_reason is {finish}"}
    return None


def has_error(body: Mapping[str, Any]) -> bool:
    return bool(body.get("error") or _choice_error(body))


def error_in_body(
    body: Mapping[str, Any], headers: Mapping[str, str], wall_now: float, streamed: bool = False
) -> base.Failure | None:
    """An `error` beside or inside the choices of a 200. `streamed`: tokens had already arrived.

    Throttling and refusals keep their class; what else goes wrong after the provider had begun is
    UpstreamError."""
    error = body.get("error")
    if not error:
        error, streamed = _choice_error(body), True
    if not error:
        return None
    body = {**body, "error": error}
    code = error.get("code") if isinstance(error, dict) else None
    if isinstance(code, str) and code.isdecimal() and len(code) == 3:
        code = int(code)
    if isinstance(code, int) and not isinstance(code, bool) and 400 <= code < 600:
        failure = classify_error(code, headers, body, wall_now)
        if not (streamed and isinstance(failure, base.Broken)):
            return failure
    return base.UpstreamError(error_message(body, "error in the reply"))


def parsed_or_none(body: bytes | bytearray | str) -> Any:
    """White space before the JSON is a keep-alive and legal (case C34), a byte order mark does no
    harm."""
    text = body.strip()
    text = text.removeprefix(BOM) if isinstance(text, str) else text.removeprefix(BOM.encode())
    try:
        return parse_json(text) if text else None
    except ValueError:
        return None


def classify_parsed(
    status: int,
    headers: Mapping[str, str],
    body: bytes | bytearray | str,
    parsed: Any,
    wall_now: float,
) -> base.Failure | None:
    """A whole, non-streamed reply; `parsed` as by `parsed_or_none`. None: its transport is sound
    and its content may be judged."""
    if status >= 400:
        return classify_error(status, headers, parsed, wall_now)
    if status >= 300:
        return base.NotServed(f"HTTP {status}: a redirection, which is not followed; check the URL")
    if not isinstance(parsed, dict):
        text = body.strip()
        if not text or (parsed is None and text[:1] in ("{", b"{")):
            return base.BodyTruncated(f"{len(body)} bytes and no end of the JSON")
        return base.BodyNotJson("the body is not a JSON object")
    if failure := error_in_body(parsed, headers, wall_now):
        return failure
    if "choices" in parsed and not parsed["choices"]:
        return base.EmptyChoices("the reply has no choices")
    return None
