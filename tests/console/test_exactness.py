"""Ground truth as a table."""

from console import exactness

TOLD = {
    "samples": 200,
    "exact": 190,
    "with_text": 200,
    "consistent": 188,
    "false": 2,
    "content": {"segments": 1_250, "exact": 1_200, "rate": 0.96, "low": 0.947, "high": 0.969},
    "a\x1b[31m": {"segments": 0, "exact": 0, "rate": None, "low": 0.0, "high": 1.0},
    "rate": 0.95,
    "low": 0.91,
    "high": 0.973,
}


def test_rows_are_kinds_then_whole_replies() -> None:
    rows = [[part[0] for part in row] for row in exactness.rows(TOLD)]
    assert rows[0] == ["content", "1,250", "96.00%", "94.70% - 96.90%"]
    assert rows[-1] == ["whole reply", "200", "95.00%", "91.00% - 97.30%"]
    assert "\x1b" not in rows[1][0] and rows[1][1:] == ["0", "0.00%", "0.00% - 100.00%"]
    assert "188 rebuilds called consistent, 2 have other ids" in exactness.note(TOLD)


def test_nothing_measured_is_no_table() -> None:
    assert exactness.rows({}) == []
    assert exactness.rows({"samples": 0, "exact": 0}) == []
    assert exactness.rows({"samples": "many"}) == []
