"""Status, headers and body -> class. Each public case of kinds c, d and e that shows in a single
reply."""

import json
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import Any

import pytest

from core.providers import base
from core.providers.chat import generation_id_in, usage_of
from core.providers.classify import (
    classify_parsed,
    kept_headers,
    parse_json,
    parsed_or_none,
    retry_after_s,
)
from core.providers.price import Price, cost_of, money
from tests.conftest import SHARED

CASES = SHARED / "cases"
needs_cases = pytest.mark.skipif(not CASES.exists(), reason=f"case files are not at {CASES}")
PAID = Price(prompt=1e-6, completion=3e-6)
WALL = 1_790_000_000.0


def classified(
    status: int, headers: dict[str, str], text: str | bytes, wall_now: float = 0.0
) -> base.Failure | None:
    return classify_parsed(status, headers, text, parsed_or_none(text), wall_now)


def body(**fields: Any) -> str:
    return json.dumps(fields)


OK = body(id="gen-1", choices=[{"finish_reason": "stop", "message": {"content": "x"}}])


@pytest.mark.parametrize(
    ("status", "text", "kind", "retryable", "paid"),
    [
        (429, body(error={"code": 429}), base.RateLimited, True, "no"),
        (503, "busy", base.Unavailable, True, "no"),
        (529, "", base.Unavailable, True, "no"),
        (402, body(error={"message": "can only afford 30104"}), base.PaymentRequired, True, "no"),
        (401, "", base.KeyRefused, True, "no"),
        (403, body(error={"message": "no"}), base.Forbidden, True, "no"),
        (403, body(error={"metadata": {"reasons": ["violence"]}}), base.Moderated, False, "no"),
        (404, "", base.NotServed, True, "no"),
        (302, "<html>", base.NotServed, True, "no"),
        (308, "", base.NotServed, True, "no"),
        (400, "", base.BadRequest, False, "no"),
        (413, "", base.BadRequest, False, "no"),
        (422, "", base.BadRequest, False, "no"),
        (500, "<html>", base.ServerError, True, "no"),
        (502, "", base.ServerError, True, "no"),
        (408, "", base.GatewayTimeout, True, "maybe"),
        (504, "", base.GatewayTimeout, True, "maybe"),
        (524, "", base.GatewayTimeout, True, "maybe"),
        (200, "", base.BodyTruncated, True, "maybe"),
        (200, '{"id":"gen-3","choi', base.BodyTruncated, True, "maybe"),
        (200, "<!DOCTYPE html>", base.BodyNotJson, True, "maybe"),
        (200, "[1]", base.BodyNotJson, True, "maybe"),
        (200, body(choices=[]), base.EmptyChoices, True, "maybe"),
        (200, body(error={"code": 429}, choices=[{}]), base.RateLimited, True, "no"),
        (200, body(error={"code": 502, "message": "x"}), base.ServerError, True, "no"),
        (200, body(error="upstream died"), base.UpstreamError, True, "insured"),
        (200, body(choices=[{"finish_reason": "error"}]), base.UpstreamError, True, "insured"),
        (200, body(choices=[{"finish_reason": "abort"}]), base.UpstreamError, True, "insured"),
        (
            200,
            body(choices=[{"error": {"code": 502, "message": "x"}, "finish_reason": "error"}]),
            base.UpstreamError,
            True,
            "insured",
        ),
    ],
)
def test_classes(
    status: int, text: str, kind: type[base.Failure], retryable: bool, paid: str
) -> None:
    failure = classified(status, {}, text)
    assert type(failure) is kind
    assert isinstance(failure, base.RETRYABLE) is retryable
    assert failure.paid == paid
    assert failure.kind == kind.error_class


def test_a_sound_reply_has_no_class() -> None:
    assert classified(200, {}, OK) is None
    assert classified(200, {}, "\n         \n" + OK) is None
    assert classified(200, {}, OK.encode()) is None


def test_retry_after_in_all_its_forms() -> None:
    date = format_datetime(datetime.fromtimestamp(WALL + 12, UTC), usegmt=True)
    error = {"error": {"availability": {"retry_after": 3}}}
    assert retry_after_s({"Retry-After": "7"}, {}, WALL) == 7.0
    assert retry_after_s({"retry-after": date}, {}, WALL) == 12.0
    assert retry_after_s({}, error, WALL) == 3.0
    assert retry_after_s({"X-RateLimit-Reset": str(int((WALL + 5) * 1000))}, {}, WALL) == 5.0
    assert retry_after_s({"Retry-After": "soon"}, {}, WALL) is None
    assert retry_after_s({"Retry-After": "-4"}, {}, WALL) == 0.0
    assert retry_after_s({"Retry-After": "inf"}, {}, WALL) is None
    assert retry_after_s({}, {}, WALL) is None


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({"X-RateLimit-Reset": "\u00b2"}, {}),
        ({"Retry-After": "1e400"}, {}),
        ({}, {"error": {"availability": {"retry_after": 10**400}}}),
    ],
)
def test_a_wait_that_is_no_number_is_none(headers: dict[str, str], body: dict[str, Any]) -> None:
    assert retry_after_s(headers, body, 0.0) is None


def test_platform_limit_is_told_from_a_provider_limit() -> None:
    own = classified(429, {}, body(error={"message": "slow down", "metadata": {}}))
    upstream = classified(
        429, {}, body(error={"message": "x", "metadata": {"provider_name": "Alder"}})
    )
    assert isinstance(own, base.Throttled) and own.platform
    assert isinstance(upstream, base.Throttled) and not upstream.platform


def test_messages_are_short_and_headers_are_few() -> None:
    failure = classified(
        400, {}, body(error={"message": "a\nb " * 500, "metadata": {"raw": {"x": 1}}})
    )
    assert failure is not None
    assert len(str(failure)) <= 300 and "\n" not in str(failure)
    kept = kept_headers({"Set-Cookie": "s=1", "X-Generation-Id": "g", "X-RateLimit-Limit": "9"})
    assert kept == {"x-generation-id": "g", "x-ratelimit-limit": "9"}


def test_lone_surrogates_are_read() -> None:
    assert parse_json(b'{"a":"\\ud83d"}') == {"a": "\ud83d"}
    with pytest.raises(ValueError):
        parse_json(b"{")


@needs_cases
def test_c28_an_error_in_a_200_is_a_rate_limit() -> None:
    case = json.loads((CASES / "C28.json").read_text())
    failure = classified(200, {}, json.dumps(case["response"]["body"]))
    assert failure is not None and failure.kind == case["expect"]["class"]
    assert failure.paid == "no"


@needs_cases
def test_c30_empty_choices_are_billed() -> None:
    case = json.loads((CASES / "C30.json").read_text())
    reply = case["response"]["body"]
    failure = classified(200, {}, json.dumps(reply))
    assert failure is not None and failure.kind == case["expect"]["class"]
    assert usage_of(reply, PAID).cost_usd == case["expect"]["cost_booked"]


@needs_cases
def test_c34_cut_html_and_padded_bodies() -> None:
    expect = json.loads((CASES / "C34.expect.json").read_text())
    for name in ("truncated", "html"):
        raw = (CASES / f"C34.{name}.txt").read_bytes()
        failure = classified(200, {}, raw)
        assert failure is not None and failure.kind == expect[name]["class"]
    assert generation_id_in((CASES / "C34.truncated.txt").read_bytes()) == "gen-3"
    assert classified(200, {}, (CASES / "C34.ws.txt").read_bytes()) is None


@needs_cases
def test_c27_zero_usage_is_missing_usage() -> None:
    case = json.loads((CASES / "C27.json").read_text())
    usage = usage_of(case["response"]["body"], PAID)
    assert usage.completion_tokens is None and usage.cost_usd is None


@needs_cases
def test_c40_costs_that_are_none() -> None:
    lines = (CASES / "C40.jsonl").read_text().splitlines()
    expected = json.loads((CASES / "C40.expect.json").read_text())
    assert len(lines) == len(expected)
    for line, expect in zip(lines, expected, strict=True):
        cost, cap = cost_of(json.loads(line)["usage"], free=False)
        want = None if expect["cost"] == "unknown" else expect["cost"]
        assert cost == want
        assert cap == expect.get("spend_cap_counts", want)


@pytest.mark.parametrize(
    "value", [None, "0.25", -1, float("nan"), float("inf"), True, [], {}, 1e300, 10**400]
)
def test_no_cost_of_the_kind_is_believed(value: Any) -> None:
    assert money(value) is None
    assert cost_of({"cost": value}, free=False) == (None, None)


def test_zero_is_believed_only_where_nothing_is_charged() -> None:
    assert cost_of({"cost": 0}, free=False) == (None, None)
    assert cost_of({"cost": 0}, free=True) == (0.0, 0.0)
    assert cost_of(None, free=True) == (0.0, 0.0)


def test_a_list_price_is_the_bill_where_the_server_says_none() -> None:
    listed = Price(prompt=1e-6, completion=2e-6, from_list=True)
    usage = usage_of({"usage": {"prompt_tokens": 100, "completion_tokens": 50}}, listed)
    assert usage.cost_usd == pytest.approx(200e-6)
    assert (
        usage_of({"usage": {"prompt_tokens": 100, "completion_tokens": 5}}, PAID).cost_usd is None
    )


@pytest.mark.parametrize("value", [3.5, -2, "7", None, True, float("nan"), 1e19, 10**400])
def test_token_counts_are_whole_numbers(value: Any) -> None:
    reply = {"usage": {"prompt_tokens": value, "completion_tokens": 4, "cost": 0.1}}
    assert usage_of(reply, PAID).prompt_tokens is None
    assert usage_of(reply, PAID).completion_tokens == 4
