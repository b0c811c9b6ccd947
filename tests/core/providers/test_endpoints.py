"""OpenRouter's endpoints, filtered and ranked."""

from typing import Any

import pytest

from core.config import OpenRouter
from core.errors import ProviderError
from core.providers.base import Advice
from core.providers.endpoints import NEEDED, choose_endpoints
from core.schema import Sampling

SAMPLING = Sampling(max_tokens=1_000)


def row(
    tag: str, prompt: str = "6e-7", completion: str = "2.5e-6", **fields: Any
) -> dict[str, Any]:
    return {
        "tag": tag,
        "provider_name": tag.split("/")[0].title(),
        "quantization": "int4",
        "pricing": {"prompt": prompt, "completion": completion},
        "supported_parameters": [*NEEDED, "tools"],
        **fields,
    }


ROWS = [
    row("novita/int4", "5e-7", "2e-6", throughput_last_30m={"p50": 40}, latency_last_30m=900),
    row("fireworks", "6e-7", "3e-6", throughput_last_30m=90, latency_last_30m=300),
    row("groq", "1e-6", "3e-6", throughput_last_30m=300, latency_last_30m=100),
]


def names(**options: Any) -> list[str]:
    return [e.spec.name for e in choose_endpoints(ROWS, OpenRouter(**options), SAMPLING)[0]]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"sort": "price"}, ["novita/int4", "fireworks", "groq"]),
        ({"sort": "throughput"}, ["groq", "fireworks", "novita/int4"]),
        ({"sort": "latency"}, ["groq", "fireworks", "novita/int4"]),
        ({"order": ["groq", "novita"]}, ["groq", "novita/int4"]),
        (
            {"order": ["groq", "novita"], "allow_fallbacks": True},
            ["groq", "novita/int4", "fireworks"],
        ),
        ({"only": ["NOVITA"]}, ["novita/int4"]),
        ({"only": ["novita/int4", "groq"], "sort": "price"}, ["novita/int4", "groq"]),
        ({"ignore": ["groq"], "sort": "price"}, ["novita/int4", "fireworks"]),
        ({"max_price_prompt": 0.55}, ["novita/int4"]),
        ({"max_price_completion": 2.5}, ["novita/int4"]),
        # preferred speeds order, they leave nobody out: tokens/s, and seconds against milliseconds
        ({"sort": "price", "preferred_min_throughput": 50.0}, ["fireworks", "groq", "novita/int4"]),
        (
            {"sort": "price", "preferred_max_latency": {"p50": 0.2}},
            ["groq", "novita/int4", "fireworks"],
        ),
        (
            {"order": ["novita", "groq", "fireworks"], "preferred_max_latency": 0.3},
            ["groq", "fireworks", "novita/int4"],
        ),
        # only the median is listed: a cutoff of the p90 is missed by nobody
        (
            {"sort": "price", "preferred_min_throughput": {"p90": 500.0}},
            ["novita/int4", "fireworks", "groq"],
        ),
    ],
)
def test_filters_and_ranks(options: dict[str, Any], expected: list[str]) -> None:
    assert names(**options) == expected


def test_prices_and_what_cancelling_does() -> None:
    chosen = {e.spec.name: e.spec for e in choose_endpoints(ROWS, OpenRouter(), SAMPLING)[0]}
    assert chosen["fireworks"].price.worst_usd(1_000, 1_000) == pytest.approx(0.0036)
    assert chosen["fireworks"].cancel_stops_bill and chosen["novita/int4"].cancel_stops_bill
    assert not chosen["groq"].cancel_stops_bill
    plain, _ = choose_endpoints(ROWS, OpenRouter(stream=False), SAMPLING)
    assert not any(e.spec.cancel_stops_bill for e in plain)  # whole replies are billed whole
    told, _ = choose_endpoints(ROWS, OpenRouter(cancellable=["groq"]), SAMPLING)
    assert all(e.spec.cancel_stops_bill for e in told)


@pytest.mark.parametrize(
    ("options", "pricing", "words"),
    [
        ({"max_price_request": 0.001}, {"request": "0.01"}, "request price $0.010 above"),
        ({"max_price_image": 0.001}, {"image": "0.01"}, "image price $0.010 above"),
        ({}, {"request": "-1"}, "no readable price"),
    ],
)
def test_every_price_is_bounded(
    options: dict[str, Any], pricing: dict[str, str], words: str
) -> None:
    priced = row("a")
    priced["pricing"] |= pricing
    with pytest.raises(ProviderError) as caught:
        choose_endpoints([priced], OpenRouter(**options), SAMPLING)
    assert words in str(caught.value)


@pytest.mark.parametrize("field", ["only", "order"])
def test_a_provider_that_is_not_there_is_named(field: str) -> None:
    options = OpenRouter(**{field: ["groq", "novta"]}, allow_fallbacks=True)
    with pytest.raises(ProviderError) as caught:
        choose_endpoints(ROWS, options, SAMPLING)
    said = str(caught.value)
    assert f"{field} names 'novta'" in said and "it has fireworks, groq, novita/int4" in said
    assert caught.value.kind == "unknown_provider"
    assert len(choose_endpoints(ROWS, OpenRouter(ignore=["novta"]), SAMPLING)[0]) == 3


@pytest.mark.parametrize("context", [500, 1_000])
def test_a_context_no_longer_than_an_answer_is_too_short(context: int) -> None:
    words = f"max_tokens 1000 leaves no room for a prompt in its {context}.; lower generate.max_t"
    with pytest.raises(ProviderError, match=words):
        choose_endpoints([row("a", context_length=context)], OpenRouter(), SAMPLING)


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({}, None),
        ({"context_length": 1_001}, 1_001),
        ({"context_length": "8k"}, None),
        ({"context_length": 8_192, "max_prompt_tokens": 5_000}, 6_000),
        ({"context_length": 8_192, "max_prompt_tokens": 8_000}, 8_192),
    ],
)
def test_what_an_endpoint_holds(fields: dict[str, Any], tokens: int | None) -> None:
    ((only,), _) = choose_endpoints([row("a", **fields)], OpenRouter(), SAMPLING)
    assert only.spec.context_tokens == tokens
    assert only.spec.holds(1_001) and only.spec.holds(9_000) == (tokens is None)


TOOLLESS = row("b", supported_parameters=[*NEEDED])
MUTE = row("c", supported_parameters=None)


@pytest.mark.parametrize(
    ("options", "tools", "left", "lines"),
    [
        ({}, False, ["a", "b", "c"], []),
        ({}, True, ["a", "c"], ["left out: b: does not support tools"]),
        # whoever drops tools in silence answers another question: never, whatever else may drop
        (
            {"require_parameters": False},
            True,
            ["a", "c"],
            [
                "left out: b: does not support tools",
                "c: not known whether `tools` are supported, and without "
                "openrouter.require_parameters they may be dropped in silence",
            ],
        ),
        ({"require_parameters": False}, False, ["a", "b", "c"], []),
        ({"only": ["a"], "require_parameters": False}, True, ["a"], []),
    ],
)
def test_an_endpoint_without_tools_is_left_out_when_prompts_declare_them(
    options: dict[str, Any], tools: bool, left: list[str], lines: list[str]
) -> None:
    rows = [row("a"), TOOLLESS, MUTE]
    chosen, said = choose_endpoints(rows, OpenRouter(**options), SAMPLING, tools)
    assert [e.spec.name for e in chosen] == left
    assert [line.removeprefix("openrouter: ") for line in said] == lines
    assert [isinstance(line, Advice) for line in said] == [False, True][: len(said)]


@pytest.mark.parametrize("required", [True, False])
def test_when_nobody_supports_tools_it_is_said_what_to_do(required: bool) -> None:
    options = OpenRouter(require_parameters=required)
    with pytest.raises(ProviderError, match=r'support tools\); set arm = "text" or loos'):
        choose_endpoints([TOOLLESS], options, SAMPLING, True)


def test_when_none_is_left_each_has_its_reason() -> None:
    with pytest.raises(ProviderError) as caught:
        choose_endpoints(ROWS, OpenRouter(quantizations=["fp8"], only=["groq"]), SAMPLING)
    assert caught.value.kind == "no_endpoint"
    assert str(caught.value).count("not in `only`") == 2
    assert "groq: quantization int4" in str(caught.value)
    with pytest.raises(ProviderError, match="the model has none"):
        choose_endpoints([None], OpenRouter(), SAMPLING)
