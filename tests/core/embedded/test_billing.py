"""The books: exact sums, holds, conventions, and what survives a restart."""

from pathlib import Path

import pytest

from core.embedded.billing import PROVIDERS, Charge, Ledger, pico, usd
from core.embedded.books import Lines, read_books
from core.errors import UsageError

ALDER, BIRCH, CEDAR = PROVIDERS


def charge(name: str = "gen-1", hold: int = 0) -> Charge:
    return Charge(
        id=name,
        provider="Alder",
        model="m",
        streamed=True,
        created=1.5,
        prompt_tokens=10,
        hold_pico=hold,
    )


def test_cost_is_exact() -> None:
    assert usd(ALDER.cost_pico(1_000_000, 1_000_000)) == 3.6
    assert usd(ALDER.cost_pico(7, 3)) == 0.0000132
    assert sum(ALDER.cost_pico(1, 1) for _ in range(1_000)) == pico(0.0036)


def test_stop_token_conventions() -> None:
    assert [p.counted(10, "stop") for p in PROVIDERS] == [10, 9, 10]
    assert [p.counted(10, "length") for p in PROVIDERS] == [10, 10, 10]


def test_holds_and_settlement() -> None:
    ledger = Ledger(1.0)
    one, two = charge("a", pico(0.3)), charge("b", pico(0.3))
    ledger.hold(one)
    ledger.hold(two)
    assert (usd(ledger.available_pico), ledger.open) == (0.4, 2)
    ledger.settle(one, pico("0.000123"), 2.0)
    assert usd(ledger.available_pico) == 0.699877
    assert ledger.bill()["total_usd"] == 0.000123
    assert ledger.open == 1


def test_affordable_tokens() -> None:
    # One cent at 3 USD per million: 3,333 tokens; the prompt's 1,000 tokens take 0.0006 of it.
    assert Ledger(0.01).affordable_tokens(ALDER, 0) == 3_333
    assert Ledger(0.01).affordable_tokens(ALDER, 1_000) == 3_133


def test_books_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "books.jsonl"
    ledger, lines = Ledger(1.0), Lines(path)
    for name in ("a", "b"):
        ledger.hold(charge(name))
        lines.write(ledger.charges[name])
    ledger.settle(ledger.charges["a"], pico(0.25), 3.0)
    lines.write(ledger.charges["a"])
    lines.close()
    with path.open("ab") as file:
        file.write(b'{"id": "torn')
    again = Ledger(1.0)
    for line in read_books(path):
        again.recall(line)
    assert again.bill()["total_usd"] == 0.25
    assert (again.charges["b"].cost_pico, again.charges["b"].cancelled) == (0, True)
    assert path.read_bytes().endswith(b"}\n")
    assert len(read_books(path)) == 2


def test_books_that_are_something_else_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "books.jsonl"
    path.write_text("[]\n")
    with pytest.raises(UsageError, match=r"books\.jsonl:1"):
        read_books(path)
