"""The screens behind the board: errors, log, probe, help, summary, chart, runs; and the themes."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from textual.pilot import Pilot

from console.screens.board import BoardScreen
from console.screens.lists import LogScreen, RunsScreen
from console.screens.modal import HelpScreen, SummaryScreen, TextScreen
from console.screens.probe import ProbeScreen
from console.screens.sample import SampleScreen
from console.widgets.lines import Lines
from core import events as ev
from core.config import Console as ConsoleConfig
from core.render.tokenizer import Tokenizer
from tests.console import recording
from tests.console.recorded_run import write_run
from tests.console.still import StillApp
from tests.console.test_app import opened, settle, until
from tests.console.test_probe import TARGET
from tests.console.test_sanitize import obeyed


async def test_errors_drill_down_to_a_cleaned_example() -> None:
    app = StillApp("generate")
    async with opened(app, (120, 36)) as pilot:
        await pilot.press("e")
        await settle(app, pilot)
        assert "rate_limited" in app.shown()
        await pilot.press("down", "enter")
        await settle(app, pilot)
        assert isinstance(app.screen, TextScreen)
        text = app.shown()
        assert "‹ESC›]0;owned‹BEL›" in text
        assert "[red]not markup[/red]" in text
        assert not obeyed(text.replace("\n", ""))


async def test_an_error_flood_and_markup_everywhere_kill_nothing() -> None:
    app = StillApp("generate")
    flood = [
        ev.ErrorRow(
            provider=f"[/{i}]\x1b]0;x\x07",
            error_class=f"[red]{i}",
            count=i,
            example=recording.HOSTILE,
        )
        for i in range(3_000)
    ]
    async with opened(app, (120, 36)) as pilot:
        app.state.apply(
            msgspec.structs.replace(app.state.view.stats, seq=10_000, errors=flood), 100.0
        )
        for n in range(200):
            app.state.apply(
                ev.Log(
                    seq=10_001 + n,
                    ts=1.0,
                    level="error",
                    message=f"[INST] {recording.HOSTILE} [/INST]",
                ),
                100.0,
            )
        app.say("[/nonsense] [red]")
        for keys in (
            (),
            ("e",),
            ("end",),
            ("enter",),
            ("escape",),
            ("escape", "l"),
            ("slash", "[", "("),
            ("escape",),
            ("escape",),
        ):
            await pilot.press(*keys)
            await settle(app, pilot)
            assert not obeyed(app.shown().replace("\n", ""))
        assert isinstance(app.screen, BoardScreen)


async def test_the_log_filters_with_a_regular_expression() -> None:
    app = StillApp("halted")
    async with opened(app, (120, 36)) as pilot:
        await pilot.press("slash")
        await settle(app, pilot)
        assert isinstance(app.screen, LogScreen)
        await pilot.press(*"canary|halted")
        await pilot.press("enter")
        await settle(app, pilot)
        text = app.shown()
        assert text.count("canary passed") == 3
        assert "halted: halt by alice" in text
        assert "gateway listens" not in text


async def _walk_the_token_table(app: StillApp, pilot: Pilot[Any], sample: SampleScreen) -> None:
    """View, part of the reply, index, search; escape leaves the search first."""
    assert sample.opened is not None and sample.opened.sample is not None
    at = sample.opened.sample.prompt_len
    body = sample.query_one("#tokens", Lines)
    await pilot.press("t")
    await settle(app, pilot)
    assert sample.mode == "table" and body.cursor == at
    assert "index      id loss segment    token" in app.shown()
    assert f"▸ {at:>6} {sample.opened.sample.token_ids[at]:>7}  ●   reasoning  T " in app.shown()
    await pilot.press("number_sign", "7", "enter")
    assert body.cursor == 7
    await pilot.press("number_sign", *"99999", "enter")
    assert body.cursor == 7
    await pilot.press("slash", *"<|tool_call_begin", "enter")
    await settle(app, pilot)
    ids = sample.opened.sample.token_ids
    calls = [i for i, token in enumerate(ids) if token == ids[body.cursor]]
    assert body.cursor == calls[0] and len(calls) == 2
    assert "2 × <|tool_call_begi" in app.shown()
    await pilot.press("n")
    assert body.cursor == calls[1]
    await pilot.press("n")
    assert body.cursor == calls[0]
    await pilot.press("escape")
    assert app.screen is sample and sample.found == []


async def test_probe_opens_a_sample_with_its_difference(tmp_path: Path) -> None:
    run = write_run(tmp_path, "done", Tokenizer.load(TARGET))
    app = StillApp("done", run)
    async with opened(app, (120, 36)) as pilot:
        await pilot.press("p")
        screen = app.screen
        assert isinstance(screen, ProbeScreen)
        await until(pilot, lambda: len(screen.found) > 3, "the list was read")
        await settle(app, pilot)
        assert "≠ mismatch" in app.shown()
        await pilot.press("down", "enter")
        await pilot.pause()
        sample = app.screen
        assert isinstance(sample, SampleScreen)
        await until(pilot, lambda: sample.opened is not None, "the sample was read")
        await settle(app, pilot)
        text = app.shown()
        assert 'FIRST DIVERGENCE @10: local 322 "⏎⏎" vs declared · kestrel 10 "⏎"' in text
        assert "rebuilt" in text.split("\n")[1]
        assert "▸  ≠" in text
        tokens = sample.query_one("#tokens", Lines)
        first = tokens.cursor
        await pilot.press("n")
        assert tokens.cursor > first
        await pilot.press("p")
        assert tokens.cursor == first
        await pilot.press("f")
        await settle(app, pilot)
        assert "⋮" in app.shown()
        await pilot.press("t")
        await settle(app, pilot)
        assert "completion · " in app.shown()
        assert "outside the loss" in app.shown()
        assert " tool_call_begin " in app.shown()
        await _walk_the_token_table(app, pilot, sample)
        await pilot.press("escape")
        assert app.screen is screen
        await pilot.press("o")
        await settle(app, pilot)
        assert screen.shown[0].verdict == "rejected"


async def test_help_lists_every_action_and_closes() -> None:
    app = StillApp("generate")
    async with opened(app, (100, 60)) as pilot:
        await pilot.press("question_mark")
        await settle(app, pilot)
        assert isinstance(app.screen, HelpScreen)
        text = app.shown()
        for word in (
            "F12 or ctrl+x",
            "stop at once",
            "Leaving the console never stops it",
            "probe",
            "freeze",
        ):
            assert word in text or word == "freeze"
        await pilot.press("escape")
        assert isinstance(app.screen, BoardScreen)


async def test_the_last_page_opens_by_itself_once() -> None:
    app = StillApp("train")
    async with opened(app, (100, 30)) as pilot:
        assert isinstance(app.screen, BoardScreen)
        for event in recording.events("done"):
            app.state.apply(event, 100.0)
        await settle(app, pilot)
        assert isinstance(app.screen, SummaryScreen)
        text = app.shown()
        assert "195 of 204" in text
        assert "2.87 tokens per forward" in text
        assert "untrained 1.01" in text
        await pilot.press("escape")
        await settle(app, pilot)
        assert isinstance(app.screen, BoardScreen)
        await pilot.press("s")
        assert isinstance(app.screen, SummaryScreen)


async def test_the_chart_is_drawn_from_the_history() -> None:
    app = StillApp("train")
    async with opened(app, (100, 30)) as pilot:
        await pilot.press("c")
        await settle(app, pilot)
        assert "loss (log10)" in app.shown()
        assert "step 228" in app.shown()
        await pilot.press("a")
        await settle(app, pilot)
        assert "accuracy of each draft step" in app.shown()


async def test_the_list_of_runs_opens_one(tmp_path: Path) -> None:
    write_run(tmp_path, "done")
    app = StillApp("done", runs_folder=tmp_path)
    app.first_run = None
    async with opened(app, (100, 24)) as pilot:
        screen = app.screen
        assert isinstance(screen, RunsScreen)
        await until(pilot, lambda: bool(screen.found), "the folder was read")
        await settle(app, pilot)
        assert recording.RUN_ID in app.shown()
        assert "✓ DONE" in app.shown()
        await pilot.press("enter")
        await settle(app, pilot)
        assert isinstance(app.screen, BoardScreen)
        await pilot.press("escape")
        await settle(app, pilot)
        assert app.screen is screen


async def test_ascii_mode_has_no_other_characters() -> None:
    app = StillApp("halted", config=ConsoleConfig(ascii=True))
    async with opened(app, (120, 36)) as pilot:
        assert app.shown().isascii()
        assert "HALTED" in app.shown()
        await pilot.press("e")
        await settle(app, pilot)
        assert app.shown().isascii()


@pytest.mark.parametrize("name", ["eyas-dark", "eyas-light", "eyas-ansi", "nord"])
async def test_every_theme_draws_the_board(name: str) -> None:
    app = StillApp("halted", config=ConsoleConfig(theme=name))
    async with opened(app, (120, 36)):
        assert app.theme == name
        assert "HALTED" in app.shown()
        strips = app.screen._compositor.render_strips()
        styles = {str(segment.style) for strip in strips for segment in strip}
        assert len(styles) > 5
