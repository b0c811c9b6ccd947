"""Garbage collection while requests are in flight, and as before afterwards."""

import gc

import pytest

from core.memory import THRESHOLDS, rare_collections


def test_collections_are_rare_inside_and_as_before_outside() -> None:
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    with pytest.raises(KeyError), rare_collections():
        assert gc.get_threshold() == THRESHOLDS and gc.get_freeze_count() > frozen
        raise KeyError
    assert gc.get_threshold() == before and gc.get_freeze_count() == 0
