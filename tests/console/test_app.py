"""The application under a pilot: what is on the screen, what keys do, what they must never do."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from textual.pilot import Pilot
from textual.widgets import Input

from console.screens.board import BoardScreen
from console.screens.lists import ErrorsScreen, LogScreen
from console.screens.modal import ConfirmScreen
from console.widgets.lines import Lines
from core import events as ev
from core.config import Console as ConsoleConfig
from tests.console import recording
from tests.console.still import StillApp
from tests.console.test_sanitize import obeyed


@asynccontextmanager
async def opened(app: StillApp, size: tuple[int, int] = (80, 24)) -> AsyncIterator[Pilot[int]]:
    async with app.run_test(size=size) as pilot:
        await settle(app, pilot)
        yield pilot


async def settle(app: StillApp, pilot: Pilot[int]) -> None:
    for _ in range(3):
        await pilot.pause()
        app.paint()
    await pilot.pause()


async def until(pilot: Pilot[int], condition: Callable[[], bool], what: str) -> None:
    for _ in range(400):
        if condition():
            return
        await pilot.pause(0.01)
    raise AssertionError(f"never: {what}")


@pytest.mark.parametrize("size", [(80, 24), (120, 36), (200, 60)])
async def test_the_board_shows_what_matters_at_every_size(size: tuple[int, int]) -> None:
    app = StillApp("generate")
    async with opened(app, size):
        text = app.shown()
        wanted = [
            "● RUNNING",
            "$0.2535/$10.00",
            "HALT armed",
            "● generate",
            "48 / 64",
            "119 / 204",
            "kestrel",
            "◐ wait 4 s",
            "▲ paused",
            "admitted 110 of 118",
            "rate_limited",
            "2 keep, 1 filter",
            "F12 HALT",
            "q detach",
            "no GPU on this host",
        ]
        for part in wanted:
            assert part in text, part
        assert len(text.split("\n")) == size[1]
        assert not obeyed(text.replace("\n", ""))


async def test_training_takes_the_room_of_generation_at_80x24() -> None:
    app = StillApp("train")
    async with opened(app):
        text = app.shown()
        assert "5 Training" in text
        assert "loss 1.358" in text
        assert "accuracy 1▇84%" in text
        assert "2 Providers" not in text


async def test_below_80x24_there_is_a_short_form() -> None:
    app = StillApp("generate")
    async with opened(app, (60, 14)) as pilot:
        assert "short form" in app.shown()
        assert "48 / 64" in app.shown()
        await pilot.press("f12")
        assert app.still.asked == ["halt"]


FOCUS: dict[str, tuple[str, ...]] = {
    "none": (),
    "pane": ("2",),
    "list": ("e",),
    "input": ("l", "slash", "a"),
    "dialog": ("K",),
    "help": ("question_mark",),
}


@pytest.mark.parametrize(
    ("focus", "key"),
    [*((focus, "f12") for focus in FOCUS), ("none", "ctrl+x"), ("input", "ctrl+x")],
)
async def test_halt_works_in_every_focus_and_asks_nothing(focus: str, key: str) -> None:
    app = StillApp("generate")
    async with opened(app) as pilot:
        await pilot.press(*FOCUS[focus])
        await pilot.pause()
        await pilot.press(key)
        await pilot.pause()
        assert app.still.asked == ["halt"]


async def test_keys_in_an_input_are_text_and_ctrl_keys_are_not(tmp_path: Path) -> None:
    app = StillApp("generate")
    async with opened(app) as pilot:
        await pilot.press("l", "slash")
        await pilot.press("q", "d", "K")
        assert app.screen.query_one("#filter", Input).value == "qdK"
        assert app.is_running
        assert app.still.asked == []
        await pilot.press("ctrl+c")
        assert "the run keeps going" in app.said[-1]
        await pilot.press("escape", "escape")
        assert isinstance(app.screen, BoardScreen)
        await pilot.press("q")
    assert app.return_code == 0
    assert app.still.asked == []


@pytest.mark.parametrize("key", ["q", "ctrl+q"])
async def test_leaving_asks_the_engine_for_nothing(key: str) -> None:
    app = StillApp("generate")
    async with opened(app) as pilot:
        await pilot.press(key)
    assert app.return_code == 0
    assert app.still.asked == []


async def test_a_second_halt_offers_kill_but_does_not_do_it() -> None:
    app = StillApp("generate")
    async with opened(app) as pilot:
        await pilot.press("f12")
        assert "HALT SENT" in app.shown()
        await pilot.press("f12")
        await pilot.pause()
        assert isinstance(app.screen, ConfirmScreen)
        assert app.still.asked == ["halt", "halt"]
        await pilot.press("escape")
        assert app.still.asked == ["halt", "halt"]


async def test_kill_needs_the_run_id_and_cancel_is_the_default() -> None:
    app = StillApp("generate")
    async with opened(app) as pilot:
        await pilot.press("K", "x", "enter")
        await pilot.pause()
        assert isinstance(app.screen, ConfirmScreen)
        await pilot.press("escape")
        assert app.still.asked == []
        await pilot.press("K")
        await pilot.pause()
        app.screen.query_one("#typed", Input).value = recording.RUN_ID
        await pilot.press("enter", "enter")
        await until(pilot, lambda: app.still.asked == ["kill"], "kill was asked for")


async def test_abandon_needs_a_stopped_run_and_its_id() -> None:
    app = StillApp("generate")
    async with opened(app) as pilot:
        await pilot.press("A")
        assert app.said[-1] == "running: halt it first, then A"
    app = StillApp("halted")
    async with opened(app) as pilot:
        stats = app.still.state.view.stats
        assert stats is not None
        await pilot.press("A")
        await pilot.pause()
        assert isinstance(app.screen, ConfirmScreen)
        assert f"{stats.prompts - stats.done:,} prompts are never asked" in app.shown()
        await pilot.press("enter")
        await pilot.pause()
        assert app.still.asked == []
        app.screen.query_one("#typed", Input).value = recording.RUN_ID
        await pilot.press("enter", "enter")
        await until(pilot, lambda: app.still.asked == ["abandon"], "abandon was asked for")


async def test_resume_is_confirmed_with_cancel_focused() -> None:
    app = StillApp("halted")
    async with opened(app) as pilot:
        await pilot.press("r")
        await pilot.pause()
        assert isinstance(app.screen, ConfirmScreen)
        assert app.focused is not None
        assert app.focused.id == "keep"
        await pilot.press("enter")
        await pilot.pause()
        assert app.still.asked == []
        await pilot.press("r", "right", "enter")
        await until(pilot, lambda: app.still.asked == ["resume"], "resume was asked for")
        app.still.state.view.reason = "budget: $10.0000 spent or reserved"
        await pilot.press("r")
        await pilot.pause()
        assert "--set run.budget_usd=USD" in app.shown()
        await pilot.press("escape")
        app.still.state.view.stages["generate"].status = "done"
        await pilot.press("r")
        await pilot.pause()
        assert "Nothing is left to send" in app.shown()
    assert app.left_running == ""


async def test_leaving_a_live_run_says_that_it_goes_on() -> None:
    app = StillApp("generate")
    async with opened(app) as pilot:
        await pilot.press("q")
    assert app.left_running == recording.RUN_ID


async def test_drain_goes_at_once_and_resume_of_a_running_run_is_refused() -> None:
    app = StillApp("generate")
    async with opened(app) as pilot:
        await pilot.press("d")
        await until(pilot, lambda: app.still.asked == ["drain"], "drain was asked for")
        await pilot.press("r")
        assert app.said[-1] == "nothing to resume: running"
        app.state.apply(ev.StateChanged(seq=app.state.view.seq + 1, state="draining"), 100.0)
        await pilot.press("r")
        assert app.said[-1] == "draining: r when it has stopped"
        assert app.still.asked == ["drain"]


async def test_a_read_only_console_changes_nothing() -> None:
    app = StillApp("generate", read_only=True)
    async with opened(app) as pilot:
        text = app.shown()
        assert "READ-ONLY" in text
        assert "F12 HALT" not in text
        assert "d drain" not in text
        for key in ("f12", "d", "r", "X", "K", "A"):
            await pilot.press(key)
            await pilot.pause()
            assert "read-only" in app.said[-1]
        assert app.still.asked == []
        assert isinstance(app.screen, BoardScreen)


async def test_after_a_halt_the_screen_keeps_working() -> None:
    app = StillApp("halted")
    async with opened(app, (120, 36)) as pilot:
        text = app.shown()
        assert "■ HALTED 12:00:52 by alice (key) · 37 cancelled, 11 received" in text
        assert "r resume" in text
        await pilot.press("e")
        assert isinstance(app.screen, ErrorsScreen)
        await pilot.press("escape", "l")
        assert isinstance(app.screen, LogScreen)
        assert "halt complete" in app.shown()


async def test_panes_focus_zoom_and_come_back() -> None:
    app = StillApp("generate")
    async with opened(app) as pilot:
        await pilot.press("2")
        await settle(app, pilot)
        assert app.focused is not None
        assert app.focused.id == "providers"
        assert "▸ 2 Providers" in app.shown()
        await pilot.press("z")
        await settle(app, pilot)
        assert "1 Requests" not in app.shown()
        assert "● RUNNING" in app.shown()
        await pilot.press("escape")
        await settle(app, pilot)
        assert "1 Requests" in app.shown()
        await pilot.press("5")
        await settle(app, pilot)
        assert "5 Training" in app.shown()
        assert "material so far" in app.shown()
        await pilot.press("6")
        await settle(app, pilot)
        assert "6 Quality" in app.shown()
        assert "1 Requests" in app.shown()


async def test_freeze_stops_painting_not_ingestion() -> None:
    app = StillApp("generate")
    async with opened(app) as pilot:
        await pilot.press("space")
        event = msgspec.structs.replace(app.state.view.stats, seq=10_000, in_flight=7)
        app.state.apply(event, 100.2)
        await settle(app, pilot)
        assert "FROZEN" in app.shown()
        assert "48 / 64" in app.shown()
        await pilot.press("space")
        await settle(app, pilot)
        assert "7 / 64" in app.shown()


async def test_refresh_rate_has_limits() -> None:
    app = StillApp("generate")
    async with opened(app) as pilot:
        await pilot.press("plus", "plus", "plus", "plus")
        assert app.refresh_hz == 4.0
        await pilot.press(*["minus"] * 8)
        assert app.refresh_hz == 0.25
    low = StillApp("generate", config=ConsoleConfig(low_bandwidth=True))
    async with opened(low) as pilot:
        assert low.refresh_hz == 1.0
        assert low.theme == "eyas-ansi"
        await pilot.press("c")
        assert "charts are off" in low.said[-1]


async def test_painting_twice_marks_nothing_dirty() -> None:
    app = StillApp("generate")
    async with opened(app) as pilot:
        widgets = list(app.screen.query(Lines))
        dirty: list[str] = []
        for widget in widgets:
            original = widget.refresh

            def note(*regions, _of=widget, _original=original, **options):
                dirty.append(str(_of.id))
                return _original(*regions, **options)

            widget.refresh = note  # type: ignore[method-assign]
        app.paint()
        await pilot.pause()
        assert dirty == []
        app.state.apply(
            msgspec.structs.replace(app.state.view.stats, seq=10_000, in_flight=47), 100.0
        )
        app.paint()
        assert dirty == ["requests"]


async def test_hidden_panes_do_not_paint() -> None:
    app = StillApp("generate")
    async with opened(app):
        assert app.screen.query_one("#training", Lines).rows == ()
