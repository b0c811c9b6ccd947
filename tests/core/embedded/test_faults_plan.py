"""The fault plan: grammar, seeds, scopes, counts and scripts."""

import pytest

from core.embedded.faults import KINDS, parse_plan, plan_of
from core.errors import UsageError


def test_the_grammar() -> None:
    plan = parse_plan("rate_limited=7:0.25@Birch#3,trim_reasoning")
    first, second = plan.faults
    assert (first.name, first.value, first.rate, first.scope, first.count) == (
        "rate_limited",
        "7",
        0.25,
        "Birch",
        3,
    )
    assert (second.value, second.rate, second.scope, second.count) == ("", 1.0, "", None)
    assert not parse_plan("").draw(b"x", "Alder")


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("trim_reasonin", "did you mean trim_reasoning"),
        ("reset:2", "0..1"),
        ("reset:0.1:0.2", "write name"),
        ("script:[", "not JSON"),
        ('{"faults": [], "oops": 1}', "write a spec"),
        ("slow=fast", "'fast' is not a number"),
        ("wrong_usage=nan", "'nan' is not a number"),
        ("trim_content=middle", "one of both, left, right"),
        ("rate_limited=soon", "seconds, none, date"),
        ('script:[["hang=x"]]', "'x' is not a number"),
        ('[{"name": "reset", "speed": 1}]', "speed"),
    ],
)
def test_bad_specs_are_one_line(spec: str, says: str) -> None:
    with pytest.raises(UsageError, match=says.replace(".", r"\.")) as caught:
        parse_plan(spec)
    assert "\n" not in str(caught.value)


def test_draws_depend_on_seed_and_content_not_on_order() -> None:
    contents = [f"prompt {i}".encode() for i in range(400)]

    def hit(seed: int, order: list[bytes]) -> dict[bytes, bool]:
        plan = parse_plan("reset:0.3", seed)
        return {c: "reset" in plan.draw(c, "Alder") for c in order}

    forward = hit(1, contents)
    assert forward == hit(1, contents[::-1])
    assert forward != hit(2, contents)
    # 400 draws at 0.3: standard deviation 9.
    assert 80 < sum(forward.values()) < 160


def test_a_second_attempt_draws_again() -> None:
    plan = parse_plan("reset:0.5", 3)
    draws = ["reset" in plan.draw(b"same", "Alder") for _ in range(40)]
    assert True in draws and False in draws


def test_scope_and_count() -> None:
    plan = parse_plan("reset@Birch#2,bad_gateway@sglang,no_usage")
    assert "reset" not in plan.draw(b"a", "Alder")
    assert plan.draw(b"a", "birch").names == ["reset", "no_usage"]
    assert plan.draw(b"b", "Birch").names == ["reset", "no_usage"]
    assert plan.draw(b"c", "Birch").names == ["no_usage"]
    assert plan.draw(b"c", "sglang").names == ["bad_gateway"]


def test_one_answer_at_most() -> None:
    plan = parse_plan("rate_limited,server_error,trim_content")
    hits = plan.draw(b"a", "Alder")
    assert hits.names == ["rate_limited", "trim_content"]
    assert hits.answer == "rate_limited"


def test_a_script_is_replayed_then_over() -> None:
    plan = parse_plan('script:["rate_limited=7", "ok", ["trim_content", "no_usage"], null]')
    names = [plan.draw(b"a", "Alder").names for _ in range(5)]
    assert names == [["rate_limited"], [], ["trim_content", "no_usage"], [], []]


def test_json_forms_and_description() -> None:
    plan = plan_of({"faults": ["reset:0.1", {"name": "no_usage", "scope": "Cedar"}], "seed": 5})
    assert plan.describe() == {
        "faults": [
            {"name": "reset", "value": "", "rate": 0.1, "scope": "", "count": None},
            {"name": "no_usage", "value": "", "rate": 1.0, "scope": "Cedar", "count": None},
        ],
        "script_left": 0,
        "hits": {},
        "seed": 5,
    }


def test_hits_are_counted() -> None:
    plan = plan_of({"faults": ["no_usage", "reset@Birch"], "script": [["no_usage", "slow=2"]]})
    for scope in ("Alder", "Alder", "birch", "sglang"):
        plan.draw(b"a", scope)
    assert plan.describe()["hits"] == {"no_usage": 3, "slow": 1, "reset": 1}


def test_every_fault_says_what_it_does() -> None:
    assert all(KINDS.values())
    assert len(KINDS) > 50
