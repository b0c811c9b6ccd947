"""Case C84: files that do not answer, and a reply of 2 MB, keep no key waiting."""

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from console import probe
from console.screens import sample as screens
from console.screens.modal import HelpScreen
from console.screens.probe import ProbeScreen
from console.screens.sample import FIRST_PAGE, LONG_TOKENS, SampleScreen
from console.widgets import tokens as tk
from console.widgets.flow import Flow
from console.widgets.line import plain
from console.widgets.lines import Lines
from core.embedded import TARGET_DIR
from core.render.tokenizer import Tokenizer
from core.schema import Sample
from core.store import RunDir, write_samples
from tests.console.still import StillApp

LOOP = threading.main_thread().name
SENTENCE = "weather in Ulm 😀\n"
TEXT_BYTES = 2_000_000


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A finished run whose one sample is a reply of 2 MB."""
    run = RunDir(tmp_path_factory.mktemp("runs") / "long")
    run.samples.mkdir(parents=True)
    write_samples(run, [long_sample(TEXT_BYTES)])
    return run


def long_sample(size: int) -> Sample:
    text = SENTENCE * (size // len(SENTENCE.encode()))
    ids = Tokenizer.load(TARGET_DIR).encode_ordinary(text)
    return Sample(
        sample_id="aa00",
        prompt_id="aa00",
        twin_id="t0",
        dataset="calls",
        arm="declared",
        backend="openrouter",
        provider="kestrel",
        token_ids=ids,
        prompt_len=3,
        verdict="consistent",
        rebuilt_tokens=len(ids) - 3,
        billed_tokens=len(ids) - 3,
    )


@pytest.fixture(autouse=True)
def heap_of_a_console() -> Iterator[None]:
    """A full collection of what the whole suite has loaded (660,000 objects) takes 0.46 s, which no
    console ever waits for: only this test's own objects are collected."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


async def until(condition: Callable[[], bool], what: str) -> None:
    for _ in range(6_000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"never: {what}")


class Stuck:
    """A call that does not return until it is let go, as on a hung file system."""

    def __init__(self, real: Callable[..., Any]) -> None:
        self._real = real
        self.inside, self.go = threading.Event(), threading.Event()
        self.thread = ""

    def __call__(self, *arguments: Any) -> Any:
        self.thread = threading.current_thread().name
        self.inside.set()
        assert self.go.wait(60)
        return self._real(*arguments)


async def test_keys_act_while_files_do_not_answer(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing, opening = Stuck(probe.rows_of), Stuck(probe.open_sample)
    monkeypatch.setattr(probe, "rows_of", listing)
    monkeypatch.setattr(probe, "open_sample", opening)
    app = StillApp("generate", run=run)
    async with app.run_test(size=(120, 36)) as pilot:
        await pilot.press("p")
        await until(listing.inside.is_set, "the list was asked for")
        await pilot.press("f12", "question_mark")
        assert app.still.asked == ["halt"]
        assert isinstance(app.screen, HelpScreen)
        await pilot.press("escape")
        listing.go.set()
        screen = app.screen
        assert isinstance(screen, ProbeScreen)
        await until(lambda: bool(screen.shown), "the list came")
        await pilot.press("enter")
        await until(opening.inside.is_set, "the sample was asked for")
        await pilot.press("f12")
        assert app.still.asked == ["halt", "halt"]
        assert "reading" in app.shown()
        opening.go.set()
    assert LOOP not in (listing.thread, opening.thread)


async def test_a_reply_of_2_mb_is_worked_on_beside_the_loop(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first page is there at once, whatever is long runs in threads, and leaving does not wait
    for them."""
    decoded_in: list[str] = []
    real_tokens = tk.tokens_of

    def tokens_of(decoder: Any, ids: Any) -> Any:
        decoded_in.append(threading.current_thread().name)
        return real_tokens(decoder, ids)

    laying = Stuck(Flow)
    found: list[int] = []

    def flow(tokens: Any, *arguments: Any) -> Flow:
        if len(tokens) <= FIRST_PAGE:
            return Flow(tokens, *arguments)
        made: Flow = laying(tokens, *arguments)
        found.append(len(made))
        return made

    monkeypatch.setattr(tk, "tokens_of", tokens_of)
    monkeypatch.setattr(screens, "Flow", flow)
    app = StillApp("generate", run=run)
    async with app.run_test(size=(120, 36)) as pilot:
        await pilot.press("p")
        listed = app.screen
        assert isinstance(listed, ProbeScreen)
        await until(lambda: bool(listed.shown), "the list came")
        gaps = asyncio.create_task(longest_gap())
        await pilot.press("enter")
        screen = app.screen
        assert isinstance(screen, SampleScreen)
        body = screen.query_one("#tokens", Lines)
        await until(lambda: len(body.rows) > 10, "the first page")
        await until(laying.inside.is_set, "the rest was begun")
        assert plain(body.rows[0]).startswith("prompt · 3 tokens")
        assert "weather in" in app.shown()
        assert plain(body.rows[-1]).strip() == "laying out …"
        await pilot.press("f12", "question_mark")
        assert app.still.asked == ["halt"]
        await pilot.press("escape", "escape")
        assert app.screen is listed
        laying.go.set()
        gaps.cancel()
        gap_s = await gaps
        assert gap_s < 0.5
        await until(lambda: bool(found), "the thread gave up")
    assert {laying.thread, *decoded_in}.isdisjoint({LOOP})
    assert set(found) == {0}  # nobody waited any more


async def longest_gap() -> float:
    """Seconds between two turns of the loop, at most, until cancelled."""
    loop = asyncio.get_running_loop()
    longest, before = 0.0, loop.time()
    try:
        while True:
            await asyncio.sleep(0.01)
            now = loop.time()
            longest, before = max(longest, now - before - 0.01), now
    except asyncio.CancelledError:
        return longest


async def test_a_long_reply_is_laid_out_to_its_end(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "long")
    run.samples.mkdir(parents=True)
    sample = long_sample(40_000)
    assert len(sample.token_ids) > LONG_TOKENS
    write_samples(run, [sample])
    app = StillApp("generate", run=run)
    async with app.run_test(size=(120, 36)) as pilot:
        await pilot.press("p")
        listed = app.screen
        assert isinstance(listed, ProbeScreen)
        await until(lambda: bool(listed.shown), "the list came")
        await pilot.press("enter")
        screen = app.screen
        assert isinstance(screen, SampleScreen)
        body = screen.query_one("#tokens", Lines)
        lines = 40_000 // len(SENTENCE.encode())
        await until(lambda: len(body.rows) > lines, "all lines")
        assert "weather" in plain(body.rows[-1])
        assert len(body.rows) < lines + 8  # two headings, and the first three tokens apart
        await pilot.press("escape")
