"""Which clock of a request has run out: a table over moments."""

from typing import Any
from unittest import mock

import pytest

from core.config import parse
from core.generate.attempt import Aloft
from core.providers.stream import GATHER_S

CONFIG = parse(
    {
        "generate": {
            "first_event_timeout_s": 10.0,
            "idle_timeout_s": 5.0,
            "total_timeout_s": 100.0,
        }
    },
    "test",
)


@pytest.mark.parametrize(
    ("flight", "lane", "now", "clock"),
    [
        ({}, {}, 1e9, ""),  # it has not left: no clock runs
        ({"left_at": 1.0}, {}, 11.0, ""),
        ({"left_at": 1.0}, {}, 11.1, "first_event_timeout"),
        ({"left_at": 1.0}, {"heard_at": 8.0}, 11.1, "first_event_timeout"),
        ({"left_at": 1.0}, {"heard_at": 8.0, "free": True}, 18.0, ""),
        ({"left_at": 1.0}, {"heard_at": 8.0, "free": True}, 18.1, "first_event_timeout"),
        ({"left_at": 1.0}, {"streams": False}, 101.0, ""),
        ({"left_at": 1.0}, {"streams": False}, 101.1, "total_timeout"),
        ({"left_at": 1.0, "kind": "json"}, {}, 50.0, ""),
        ({"left_at": 1.0, "kind": "json"}, {}, 101.1, "total_timeout"),
        ({"left_at": 1.0, "first_at": 2.0}, {}, 7.0 + GATHER_S, ""),
        ({"left_at": 1.0, "first_at": 2.0}, {}, 7.1 + GATHER_S, "stream_idle_timeout"),
        ({"left_at": 1.0, "first_at": 2.0, "last_at": 9.0}, {}, 14.0 + GATHER_S, ""),
        ({"left_at": 1.0, "first_at": 2.0, "last_at": 99.0}, {}, 101.1, "total_timeout"),
    ],
)
def test_the_clock_that_has_run_out(
    flight: dict[str, Any], lane: dict[str, Any], now: float, clock: str
) -> None:
    about = {"streams": True, "free": False, "heard_at": 0.0} | lane
    where = mock.Mock(heard_at=about["heard_at"])
    where.provider.streams = about["streams"]
    where.spec.price.free = about["free"]
    request = mock.Mock()
    request.sampling.max_tokens = 8
    aloft = Aloft(mock.Mock(), where, request, 0.5, mock.Mock())
    for name, value in flight.items():
        setattr(aloft.flight, name, value)
    assert aloft.overdue(now, CONFIG) == clock
