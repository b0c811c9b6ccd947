"""What every message of ours promises."""

import pytest

from core.errors import EyasError, StoreError, boundary


def test_a_message_is_one_line_that_a_terminal_only_shows() -> None:
    said = str(EyasError("body: \x1b]0;owned\x07\r\nno\u2028more \u202eevil\x9b2J"))
    assert said.isprintable() and said.split() == ["body:", "]0;owned", "no", "more", "evil", "2J"]


def test_a_boundary_names_the_place_and_lets_our_own_errors_pass() -> None:
    with (
        pytest.raises(StoreError, match=r"^a\.json: KeyError: 'x'$"),
        boundary(StoreError, "a.json"),
    ):
        raise KeyError("x")
    own = EyasError("said already")
    with pytest.raises(EyasError) as caught, boundary(StoreError, "a.json"):
        raise own
    assert caught.value is own
