"""The states of one engine, in this process: they never go back; every halt leaves an account."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core import events as ev
from core.config import Config, parse
from core.errors import EXIT_HALTED, EXIT_TRIPWIRE, Halted
from core.journal import load_view, read_journal
from core.pipeline import engine as en
from core.pipeline.setting import write_prompts
from core.pipeline.stages import Stage
from core.store import RunDir, create_run


@pytest.fixture
def config() -> Config:
    raw = {
        "run": {"min_free_disk_bytes": 1, "stages": ["train"]},
        "dataset": [{"name": "d", "kind": "embedded", "limit": 2}],
        "tripwires": {"enabled": True},
    }
    return parse(raw, "test")


@pytest.fixture
def run(config: Config, tmp_path: Path) -> RunDir:
    return create_run(config, tmp_path, "states", ["test"])


def states(run: RunDir) -> list[str]:
    return [e.state for e in read_journal(run) if isinstance(e, ev.StateChanged)]


class Training:
    """A stage child that diverges at its second step and ends when it is told to."""

    def __init__(self, run: RunDir, stage: Stage, relay: Callable[[ev.Event], None]) -> None:
        self._relay, self._stopped = relay, asyncio.Event()

    async def run(self) -> dict[str, Any]:
        self._relay(ev.Train(step=1, total_steps=9, loss=2.0, checkpoint_step=1))
        self._relay(ev.Train(step=2, total_steps=9, loss=float("nan"), checkpoint_step=1))
        await self._stopped.wait()
        raise Halted("train: stopped")

    def halt(self, source: str, by: str) -> None:
        self._stopped.set()


async def test_a_tripped_training_leaves_an_account(
    run: RunDir, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(en, "StageChild", Training)
    assert await en.Engine(run, config, en.Options([])).main() == EXIT_TRIPWIRE
    assert states(run) == ["starting", "running", "halting", "tripped"]
    view = load_view(run)
    assert view.halt is not None and view.halt.complete
    assert (view.halt.source, view.halt.by, view.halt.checkpoint_step) == ("tripwire", "loss", 1)
    assert view.state == "tripped" and "loss nan at step 2" in view.reason


async def test_a_halt_before_the_prompts_are_read_is_not_taken_back(
    run: RunDir, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(en, "StageChild", Training)
    engine = en.Engine(run, config, en.Options([]))
    loop = asyncio.get_running_loop()

    async def halt() -> None:
        engine.halt("command", "tests")

    def halted_meanwhile(run: RunDir, config: Config) -> Any:
        asyncio.run_coroutine_threadsafe(halt(), loop).result(30)
        return write_prompts(run, config)

    monkeypatch.setattr(en, "write_prompts", halted_meanwhile)
    assert await engine.main() == EXIT_HALTED
    assert states(run) == ["halting", "halted"]
    view = load_view(run)
    assert view.halt is not None and (view.halt.source, view.halt.by) == ("command", "tests")
    assert not any(isinstance(e, ev.StageStarted) for e in read_journal(run))


async def test_a_halt_or_drain_while_the_engine_announces_itself_is_not_taken_back(
    run: RunDir, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(en, "StageChild", Training)
    engines: list[en.Engine] = []
    told = en.Options([], announce=lambda record: engines[-1].halt("command", "tests"))
    engines.append(en.Engine(run, config, told))
    assert await engines[-1].main() == EXIT_HALTED
    assert states(run) == ["starting", "halting", "halted"]
    seq = load_view(run).seq
    told = en.Options([], announce=lambda record: engines[-1]._drain("enough"))
    engines.append(en.Engine(run, config, told))
    assert await engines[-1].main() == EXIT_HALTED
    later = [e.state for e in read_journal(run, seq) if isinstance(e, ev.StateChanged)]
    assert later == ["starting", "draining", "halted"]
