"""The reducer: what events become, without a terminal, a clock or a file."""

import msgspec
import pytest

from console.state import ConsoleState
from core import events as ev
from core import view as vw
from tests.console import recording
from tests.console.recording import BASE_TS


def replay(phase: str) -> ConsoleState:
    state = ConsoleState(recording.RUN_ID)
    for event in recording.events(phase):
        state.apply(event, 100.0)
    return state


def test_the_recording_has_every_type_of_event() -> None:
    seen = {type(e) for phase in recording.PHASES for e in recording.events(phase)}
    every = set(ev.AnyEvent.__args__)
    assert every - seen == {ev.StageFailed}


def test_repeated_events_change_nothing() -> None:
    events = recording.events("generate")
    once, twice = ConsoleState("r"), ConsoleState("r")
    for event in events:
        once.apply(event, 1.0)
    for event in [*events, *events[len(events) // 2 :]]:
        twice.apply(event, 1.0)
    assert msgspec.json.encode(once.view) == msgspec.json.encode(twice.view)
    assert list(once.series.done_per_min) == list(twice.series.done_per_min)
    assert once.log_lines() == twice.log_lines()


def test_snapshot_and_tail_equal_the_whole_journal() -> None:
    events = recording.events("done")
    whole, late = ConsoleState("r"), ConsoleState("r")
    for event in events:
        whole.apply(event, 1.0)
    view = vw.RunView()
    for event in events[:300]:
        vw.fold(view, event)
    late.load(vw.decode(vw.encode(view)), 1.0)
    for event in events[250:]:
        late.apply(event, 1.0)
    assert vw.encode(late.view) == vw.encode(whole.view)


def test_history_from_before_the_snapshot_comes_first() -> None:
    events = recording.events("generate")
    whole, late = ConsoleState("r"), ConsoleState("r")
    for event in events:
        whole.apply(event, 1.0)
    view = vw.RunView()
    for event in events[:150]:
        vw.fold(view, event)
    late.load(view, 1.0)
    for event in events[150:]:
        late.apply(event, 1.0)
    late.recall(events[:150])
    assert list(late.series.usd_per_min) == list(whole.series.usd_per_min)
    assert list(late.series.cpu) == list(whole.series.cpu)
    assert late.log_lines() == whole.log_lines()


def test_phases() -> None:
    running, halted, tripped, done = (replay(p) for p in ("generate", "halted", "tripped", "done"))
    assert (running.state, running.finished, running.halt_shown) == ("running", False, False)
    assert (halted.state, halted.finished, halted.halt_shown) == ("halted", True, True)
    assert (tripped.state, tripped.halt_shown) == ("tripped", True)
    assert (done.state, done.finished, done.halt_shown) == ("done", True, False)
    assert not running.training_phase
    assert done.training_phase
    assert replay("train").training_phase


def test_a_new_life_keeps_the_counts_and_neither_the_halt_nor_the_rates() -> None:
    state = replay("halted")
    assert state.view.halt is not None and state.view.stats is not None
    before, verdicts = state.view.stats, state.verdicts
    assert sum(verdicts.values()) > 0
    state.apply(ev.RunStarted(seq=99_999, run_id="r", resumed=True, stages=["generate"]), 1.0)
    after = state.view.stats
    assert state.view.halt is None
    assert (after.ok, after.spent_usd, after.providers) == (
        before.ok,
        before.spent_usd,
        before.providers,
    )
    assert before.done_per_min > 0 and after.done_per_min == after.usd_per_min == 0.0
    assert after.forecast_usd is None and after.eta_s is None
    assert state.verdicts == verdicts and after.verdicts == {}
    state.apply(ev.Stats(seq=100_000, verdicts={"exact": 2}), 1.0)
    assert state.view.stats.providers == before.providers  # of a life that gives up
    assert state.verdicts == {**verdicts, "exact": verdicts["exact"] + 2}


def test_questions_of_the_top_bar() -> None:
    state = replay("generate")
    assert state.stage is not None
    assert state.stage.name == "generate"
    assert state.budget_usd == 10.0
    assert state.elapsed_s(BASE_TS + 51) == 51
    assert state.eta_s() == pytest.approx(35.4, abs=0.1)
    assert state.age_s(100.4) == pytest.approx(0.4)
    assert state.admitted() == (110, 118)
    left = state.budget_left_s()
    assert left is not None
    assert left == pytest.approx((10 - state.spent_usd) / state.view.stats.usd_per_min * 60)  # type: ignore[union-attr]
    done = replay("done")
    assert done.eta_s() is None
    assert done.elapsed_s(BASE_TS + 9_999) == pytest.approx(192.6)


def test_the_rebuild_has_the_last_word_on_verdicts() -> None:
    state = replay("generate")
    assert state.verdicts["exact"] == 53
    final = {"exact": 90, "consistent": 100, "rejected": 14}
    state.apply(ev.StageFinished(seq=99_999, stage="reconstruct", summary={"verdicts": final}), 1.0)
    assert state.verdicts == final
    assert state.admitted() == (190, 204)


def test_training_has_its_own_estimate() -> None:
    state = replay("train")
    assert state.view.train is not None
    assert state.eta_s() == state.view.train.eta_s
    generating = replay("generate")
    assert generating.view.stats is not None
    assert generating.eta_s() == generating.view.stats.eta_s
    # generate's last estimate is none for the stages after it
    generating.apply(ev.StageStarted(seq=99_999, stage="extract"), 1.0)
    generating.view.stages["generate"].status = "done"
    assert generating.eta_s() is None
    assert len(state.series.accuracy) == 7


def test_a_dead_engine_is_crashed_until_it_speaks_again() -> None:
    state = replay("generate")
    state.crashed = True
    assert state.state == "crashed"
    assert state.halt_shown
    state.apply(ev.decode(b'{"type":"state","seq":99999,"ts":1.0,"state":"running"}'), 1.0)
    assert state.state == "running"


def test_the_log_is_one_sequence_of_everything_said() -> None:
    lines = replay("halted").log_lines()
    assert [x.seq for x in lines] == sorted(x.seq for x in lines)
    text = [(x.source, x.level, x.text) for x in lines]
    assert ("operator", "warn", "halt by alice (harrier looks wrong)") in text
    assert ("run", "warn", "halted: halt by alice") in text
    account = "37 cancelled, 11 received; spent $0.2631, saved $0.0892, uncertain $0.0021"
    assert ("halt", "warn", f"halt complete: {account}") in text
    assert any(source == "canary" and "passed" in said for source, _, said in text)
    assert any(x.source == "tripwire" for x in replay("tripped").log_lines())


def test_a_state_and_its_reason_are_said_once() -> None:
    state = replay("done")
    for seq, reason in enumerate(("halted (alice, smell)", "no key; set one"), 10**6):
        state.apply(ev.StateChanged(seq=seq, ts=BASE_TS, state="halted", reason=reason), 1.0)
    assert [x.text for x in state.log_lines()][-2:] == [
        "halted (alice, smell)",
        "halted: no key; set one",
    ]


def test_a_failed_stage_is_in_the_log() -> None:
    state = ConsoleState("r")
    state.apply(ev.StageFailed(seq=1, ts=5.0, stage="train", error="loss is NaN at step 3"), 1.0)
    assert [x.text for x in state.log_lines()] == ["train failed: loss is NaN at step 3"]
