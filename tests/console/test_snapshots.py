"""Pictures of the main screens, at fixed sizes with frozen clocks. Few on purpose: Textual is
pinned exactly.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from textual.pilot import Pilot

from console import probe
from tests.console.recorded_run import Letters, write_run
from tests.console.still import StillApp
from tests.console.test_app import settle

SHOTS = {
    "board-80x24": ("generate", (80, 24), ()),
    "board-120x36": ("generate", (120, 36), ()),
    "halted-80x24": ("halted", (80, 24), ()),
    "training-120x36": ("train", (120, 36), ("5",)),
}


async def _settled(pilot: Pilot[int]) -> None:
    assert isinstance(pilot.app, StillApp)
    await settle(pilot.app, pilot)


@pytest.mark.parametrize("name", list(SHOTS))
def test_the_board_looks_as_it_did(name: str, snap_compare: Any) -> None:
    phase, size, keys = SHOTS[name]

    async def before(pilot: Pilot[int]) -> None:
        await _settled(pilot)
        await pilot.press(*keys)
        await _settled(pilot)

    assert snap_compare(StillApp(phase), terminal_size=size, run_before=before)


def test_a_sample_looks_as_it_did(
    tmp_path: Path, snap_compare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "_renderer", lambda run: (SimpleNamespace(tokenizer=Letters()), ""))
    run = write_run(tmp_path, "done", Letters())

    async def before(pilot: Pilot[int]) -> None:
        await _settled(pilot)
        await pilot.press("p")
        for _ in range(200):
            await pilot.pause(0.02)
            if len(getattr(pilot.app.screen, "found", ())) > 3:
                break
        await pilot.press("down", "enter")
        for _ in range(200):
            await pilot.pause(0.02)
            if getattr(pilot.app.screen, "opened", None) is not None:
                break
        await _settled(pilot)

    assert snap_compare(StillApp("done", run), terminal_size=(100, 30), run_before=before)
