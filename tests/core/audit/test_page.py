"""The report page: hostile text stays text, the structure never depends on it, the plots say the
numbers."""

import re
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.audit import charts
from core.audit.page import render

HOSTILE = (
    "</td></svg></style><script>alert(1)</script><img src=x onerror=alert(1)>\"'\x1b[2J\u202e&amp;"
)


def share(hits: int, total: int) -> dict[str, Any]:
    return {"hits": hits, "total": total, "low": 0.1, "high": 0.9}


def arm() -> dict[str, Any]:
    rates = ("trigger", "undeclared", "schema_valid", "native_id", "content_before")
    return {**{r: share(3, 4) for r in rates}, "calls_per_reply": 1.5, "reasoning_tokens": 42.0}


def account(name: str = "plain") -> dict[str, Any]:
    """Every part of an account, with `name` wherever text may come from outside."""
    agreement = {
        "pairs": 40,
        "trigger_p": 0.00012,
        "f1": 0.75,
        "name_match": share(9, 10),
        "args_match": share(8, 9),
        "same_finish": share(30, 40),
    }
    comparison = {
        "dataset": name,
        "provider": name,
        "arm": name,
        "all": arm(),
        "twins": arm(),
        "reference": arm(),
        "agreement": agreement,
        "deviations": [{"metric": name, "saw": name, "p": 0.0001, "remedy": "mask"}],
        "likelihood": [
            {"segment": name, "samples": 9, "shift_nats": -0.25, "distance": 0.4, "p": 1e-9}
        ],
    }
    cost = {"tokens": 1200, "samples": 12, "paid_usd": 0.25, "again_usd": 0.5}
    decision = {
        "dataset": name,
        "decision": name,
        "reason": name,
        "trainable": 90,
        "trainable_tokens": 9000,
        "costs": {"keep": cost, "regenerate": cost},
    }
    length = {
        "steps": 10,
        "tokens": 25,
        "acceptance_length": 2.5,
        "rate_by_position": [0.8, None, 0.4],
    }
    return {
        "run": {
            "run_id": name,
            "state": name,
            "reason": name,
            "created_at": 0.0,
            "host": name,
            "git_sha": name,
            "config_hash": name,
            "versions": {name: name},
            "target": name,
            "variant": name,
            "budget_usd": 100.0,
        },
        "stages": [{"name": name, "status": name, "seconds": 7200.0}],
        "made": {
            "prompts": 100,
            "finished": 98,
            "samples": 96,
            "trainable": 90,
            "tokens": 9999,
            "trainable_tokens": 9000,
            "table": [
                {
                    "dataset": name,
                    "arm": name,
                    "prompts": 100,
                    "outcomes": {name: 98},
                    "samples": 96,
                    "trainable": 90,
                    "tokens": 9999,
                    "trainable_tokens": 9000,
                },
            ],
            "verdicts": {name: {"exact": 3, "consistent": 1}},
            "lost": [{"class": name, "count": 2, "by_provider": {name: 2}, "example": name}],
        },
        "spent": {
            "total_usd": 12.5,
            "uncertain_usd": 0.5,
            "open": 0,
            "usd_per_million_kept": 3.25,
            "by_provider": [{"provider": name, "usd": 12.5, "replies": 96}],
            "curve": [[0.0, 0.0], [60.0, 6.0], [120.0, 12.5]],
        },
        "tripwires": [],
        "audit": {
            "exactness": {
                "samples": 50,
                "exact": 49,
                "rate": 0.98,
                "low": 0.895,
                "high": 0.996,
                "consistent": 49,
                "false": 0,
                "kinds": {
                    name: {
                        "segments": 50,
                        "canonical": 49,
                        "compared": 50,
                        "same_text": 50,
                        "exact": 49,
                        "tokens": 500,
                        "exact_tokens": 490,
                        "low": 0.895,
                        "high": 0.996,
                    }
                },
            },
            "semantics": {"comparisons": [comparison]},
            "decisions": [decision],
            "findings": [{"severity": name, "rule": name, "samples": 3, "by_provider": {name: 3}}],
            "applied": [
                {"decision": name, "datasets": [name], "samples": 1, "tokens": 2, "paid_usd": 0.1}
            ],
        },
        "drafter": {
            "draft_tokens": 3,
            "prompts": 24,
            "lossless_prompts": 24,
            "walk": length,
            "decoded": length,
            "untrained": length,
            "by_dataset": {name: length},
            "coverage_by_dataset": {name: 0.99},
        },
        "training": {"loss": [[0.0, 7.0], [10.0, 2.0]]},
        "warnings": [name],
    }


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.events.append(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag: str) -> None:
        self.events.append("/" + tag)


def structure(page: str) -> Tags:
    tags = Tags()
    tags.feed(page)
    tags.close()
    return tags


def test_a_hostile_name_changes_no_tag() -> None:
    plain, hostile = structure(render(account())), structure(render(account(HOSTILE)))
    assert plain.events == hostile.events
    assert plain.attributes == hostile.attributes
    assert not {"onerror", "src", "href", "onload"} & hostile.attributes
    assert "script" not in hostile.events and "img" not in hostile.events


def test_no_control_byte_and_no_direction_mark_gets_through() -> None:
    page = render(account(HOSTILE))
    assert "\x1b" not in page and "\u202e" not in page
    assert "&lt;script&gt;" in page
    assert page.isprintable() or not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", page)


@settings(max_examples=25, deadline=None)
@given(st.text(alphabet=st.characters(codec=None), max_size=60))
def test_any_text_leaves_the_structure_alone(name: str) -> None:
    page = render(account(name))
    assert structure(page).events == structure(render(account())).events
    page.encode()  # no lone surrogate is left


def test_the_page_asks_for_nothing_outside() -> None:
    page = render(account())
    assert "default-src 'none'" in page
    assert (
        "http" not in page.replace("http-equiv", "")
        and "url(" not in page
        and "@import" not in page
    )


def test_every_opened_tag_is_closed() -> None:
    stack: list[str] = []
    empty = {"meta", "rect", "circle", "line", "path", "polyline", "polygon"}
    for event in structure(render(account())).events:
        if event.startswith("/"):
            if event[1:] in empty and (not stack or stack[-1] != event[1:]):
                continue
            assert stack.pop() == event[1:]
        elif event not in empty:
            stack.append(event)
    assert stack == []


@pytest.mark.parametrize(
    "said",
    [
        "90",
        "of 96, 9,000 tokens",
        "$12.50",
        "98.0%",
        "2.50",
        "untrained 2.50",
        "2.0 h of work",
        "0.00012",
        "24 outputs equal plain greedy decoding",
        "-0.250",
        "$0.5000",
        "$3.250 per million kept tokens",
    ],
)
def test_the_numbers_are_on_the_page(said: str) -> None:
    assert said in render(account())


def test_a_run_with_nothing_has_a_page() -> None:
    bare = account()
    for part in ("audit", "drafter", "training"):
        del bare[part]
    bare["made"] |= {"table": [], "verdicts": {}, "lost": [], "samples": 0, "trainable": 0}
    bare["spent"] |= {"by_provider": [], "curve": [], "usd_per_million_kept": None}
    bare |= {"stages": [], "warnings": []}
    page = render(bare)
    assert "Nothing was rejected" in page and "The drafter" not in page


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (0, 0.9, [0, 0.2, 0.4, 0.6, 0.8]),
        (3, 17, [5, 10, 15]),
        (0, 0, [0, 1]),
        (-1, 1, [-1, -0.5, 0, 0.5, 1]),
    ],
)
def test_ticks(low: float, high: float, ticks: list[float]) -> None:
    assert charts.nice_ticks(low, high) == pytest.approx(ticks)


def test_bars_are_as_long_as_their_values() -> None:
    drawn = charts.bars([("a", 10.0, "10"), ("b", 5.0, "5"), ("c", 0.0, "0")], "n")
    widths = [float(w) for w in re.findall(r'<rect [^>]*width="([0-9.]+)"', drawn)]
    assert widths[0] == pytest.approx(2 * widths[1], abs=0.1) and widths[2] == 1.0


def test_stacked_parts_fill_the_row() -> None:
    drawn = charts.stacked([("p", {"exact": 3, "rejected": 1})], ("exact", "rejected"))
    widths = [float(w) for w in re.findall(r'<rect [^>]*width="([0-9.]+)"', drawn)]
    assert widths[0] == pytest.approx(3 * widths[1], abs=0.2)
    assert sum(widths) == pytest.approx(charts.WIDTH - charts.LABEL - charts.VALUE, abs=0.2)


def test_a_curve_needs_two_finite_points() -> None:
    one = [[0.0, 1.0], [1.0, float("nan")]]
    assert charts.curve(one, "n", str, str) == ""
    assert charts.curve([*one, [2.0, 3.0]], "n", str, str).count("<polyline") == 1
    assert charts.columns([], "n") == ""
