"""Panes and edges are pure functions: their widths are exact everywhere and they say what they
must.
"""

import msgspec
import pytest

from console.plain import status_line
from console.state import ConsoleState
from console.widgets import bars, run_panes, work_panes
from console.widgets.line import cells, plain
from core import events as ev
from tests.console import recording
from tests.console.recording import BASE_TS
from tests.console.test_sanitize import obeyed
from tests.console.test_state import replay

PANES = (
    run_panes.requests,
    run_panes.providers,
    run_panes.spend,
    run_panes.compact,
    work_panes.host,
    work_panes.training,
    work_panes.quality,
    work_panes.log,
)


@pytest.mark.parametrize("phase", [*recording.PHASES, "empty"])
@pytest.mark.parametrize("pane", PANES, ids=lambda f: f.__name__)
def test_every_pane_fits_every_box(pane, phase: str) -> None:
    state = ConsoleState("r") if phase == "empty" else replay(phase)
    for width in (20, 24, 36, 38, 54, 58, 76, 116, 196):
        for height in (1, 3, 5, 6, 9, 20):
            lines = pane(state, width, height)
            assert 0 < len(lines) <= height
            for line in lines:
                assert cells(line) <= width
                assert not obeyed(plain(line))


@pytest.mark.parametrize("phase", recording.PHASES)
@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
def test_edges_are_exactly_as_wide_as_the_screen(phase: str, width: int) -> None:
    state = replay(phase)
    state.halt_armed = True
    lines = [
        bars.top_bar(state, width, 100.4, BASE_TS + 51),
        bars.stage_strip(state, width),
        *bars.halt_banner(state, width),
        bars.footer([("F12", "HALT"), ("q", "detach")], width, "note"),
    ]
    assert [cells(line) for line in lines] == [width] * len(lines)


def top(state: ConsoleState, width: int = 120, now: float = 100.4) -> str:
    return plain(bars.top_bar(state, width, now, BASE_TS + 51))


def test_top_bar_says_state_money_age_and_halt() -> None:
    state = replay("generate")
    state.link, state.halt_armed = "live", True
    for width in (80, 120):
        assert "● RUNNING" in top(state, width)
        assert "$0.2535/$10.00" in top(state, width)
        assert "0.4 s ago" in top(state, width)
        assert "HALT armed" in top(state, width)
    state.halt_armed = False
    assert "HALT LINK LOST" in top(state)
    state.read_only = True
    assert "READ-ONLY" in top(state)
    assert "HALT" not in top(state)
    state.frozen = True
    assert "FROZEN" in top(state, 80)


def test_what_a_slow_link_skipped_is_on_the_top_bar() -> None:
    state = replay("generate")
    state.link, state.link_note = "live", "slow link: 12 events skipped"
    assert "slow link: 12 events skipped" in top(state, 160)
    state.link = "lost"
    assert "skipped" not in top(state, 160)


def test_data_age_turns_into_words() -> None:
    state = replay("generate")
    state.link = "live"
    assert "STALE 14 s" in top(state, now=114.0)
    assert "NO HEARTBEAT 2 min" in top(state, now=225.0)
    state.link = "lost"
    assert "link lost" in top(state)
    assert "ended 12:03:12" in top(replay("done"))


def test_every_state_has_a_glyph_and_a_word() -> None:
    words = {}
    for phase, word in (
        ("generate", "● RUNNING"),
        ("halted", "■ HALTED"),
        ("tripped", "▲ TRIPPED"),
        ("done", "✓ DONE"),
    ):
        assert word in top(replay(phase))
        words[phase] = word
    assert len(set(words.values())) == 4
    crashed = replay("generate")
    crashed.crashed = True
    assert "✗ CRASHED" in top(crashed)


def test_the_banner_is_the_halts_own_account() -> None:
    text = " ".join(plain(line) for line in bars.halt_banner(replay("halted"), 120))
    assert "■ HALTED 12:00:52 by alice (key)" in text
    assert "37 cancelled, 11 received" in text
    assert "spent $0.2631, saved $0.0892, uncertain $0.0021" in text
    assert "r resume" in " ".join(plain(line) for line in bars.halt_banner(replay("halted"), 80))
    wire = " ".join(plain(line) for line in bars.halt_banner(replay("tripped"), 120))
    assert "trigger_rate: 61% of 31 replies" in wire
    assert "pin other providers" in wire
    assert bars.halt_banner(replay("generate"), 80) == []
    failed = replay("generate")
    failed.apply(
        ev.StateChanged(seq=10**6, ts=BASE_TS, state="failed", reason="no key; set one"), 1.0
    )
    text = plain(bars.halt_banner(failed, 80)[0]).strip()
    assert text.startswith("✗ FAILED 12:00:00 · no key; set one") and text.endswith("r resume")
    failed.view.reason = "word " * 100
    shown = [plain(line).strip() for line in bars.halt_banner(failed, 80)]
    assert len(shown) == 3 and shown[2].endswith("…")  # what is missing is seen to be missing
    pressed = replay("generate")
    pressed.halt_pressed_at = BASE_TS
    assert "HALT SENT 12:00:00" in plain(bars.halt_banner(pressed, 80)[0])


def test_the_strip_shows_the_working_stage() -> None:
    assert "● generate" in plain(bars.stage_strip(replay("generate"), 80))
    assert " 58%" in plain(bars.stage_strip(replay("generate"), 80))
    assert "■ generate" in plain(bars.stage_strip(replay("halted"), 80))
    train = plain(bars.stage_strip(replay("train"), 120))
    assert "✓ extract" in train
    assert "● train" in train
    assert "○ export" in train


def test_providers_are_shown_by_state_and_the_rest_is_counted() -> None:
    full = [plain(line) for line in run_panes.providers(replay("generate"), 116, 8)]
    assert full[0].split() == [
        "provider",
        "in",
        "flight",
        "done",
        "err",
        "429",
        "p50",
        "p99",
        "ttft",
        "tok/s",
        "$/min",
        "spent",
        "state",
    ]
    assert "◐ wait 4 s" in full[3]
    assert "▲ paused" in full[4]
    short = [plain(line) for line in run_panes.providers(replay("generate"), 116, 4)]
    assert len(short) == 4
    assert "+2 more" in short[-1]


def test_a_stopped_provider_says_why() -> None:
    row = ev.ProviderRow(name="merlin", stopped="mismatch_rate")
    state = ConsoleState("r")
    state.apply(ev.Stats(seq=1, providers=[row]), 1.0)
    assert "■ mismatch_rate" in plain(run_panes.providers(state, 150, 5)[1])


def test_rates_of_a_finished_stage_are_not_shown() -> None:
    def burn(phase: str) -> str:
        return next(plain(x) for x in run_panes.spend(replay(phase), 38, 9) if "burn" in plain(x))

    assert "/min" in burn("generate")
    assert burn("done").split() == ["burn", "–"]


def overshooting(exposure_usd: float | None, **fields: int) -> ConsoleState:
    """A run whose reservations are likely costs, not worst cases."""
    state = ConsoleState("r")
    state.apply(ev.RunStarted(seq=1, run_id="r", budget_usd=100.0), 1.0)
    state.apply(ev.StateChanged(seq=2, state="running"), 1.0)
    stats = ev.Stats(seq=3, spent_usd=98.0, reserved_usd=1.0, budget_usd=100.0, in_flight=40)
    changes = {"exposure_usd": exposure_usd, **fields}
    state.apply(msgspec.structs.replace(stats, **changes), 1.0)
    return state


@pytest.mark.parametrize(("most", "style"), [(99.5, "text"), (101.25, "warn")])
def test_how_far_the_budget_may_be_passed_is_shown_beside_it(most: float, style: str) -> None:
    state = overshooting(most)
    said = f"at most ${most:.2f}"
    for width in (24, 38):
        rows = run_panes.spend(state, width, 9)
        (row,) = [r for r in rows if "at most" in plain(r)]
        assert plain(row).split() == ["at", "most", f"${most:.2f}"]
        assert {s.style for s in row if "$" in s.text} == {style}
        assert rows.index(row) == 1 + next(n for n, r in enumerate(rows) if "reserved" in plain(r))
    assert f"$98.00/$100.00  {said}" in plain(bars.top_bar(state, 120, 1.2, BASE_TS))
    assert f"$98.00 of $100.00 ({said})" in status_line(state, BASE_TS)
    narrow = plain(bars.top_bar(state, 60, 1.2, BASE_TS))
    assert "$98.00/$100.00" in narrow and "at most" not in narrow


@pytest.mark.parametrize(
    "state", [overshooting(None), overshooting(98.0, in_flight=0)], ids=["worst cases", "all in"]
)
def test_where_nothing_can_be_passed_nothing_is_shown(state: ConsoleState) -> None:
    said = [*map(plain, run_panes.spend(state, 38, 9)), status_line(state, BASE_TS)]
    assert not [words for words in (*said, top(state)) if "at most" in words]


def test_gpus_lead_with_power_and_show_throttling() -> None:
    state = ConsoleState("r")
    gpu = ev.GpuRow(
        index=0,
        util_pct=97,
        power_w=612,
        power_limit_w=700,
        mem_used_bytes=98_000_000_000,
        mem_total_bytes=141_000_000_000,
        temp_c=67,
        throttle="power cap",
    )
    for seq in range(1, 6):
        state.apply(ev.Host(seq=seq, gpus=[gpu], cpus=16, ram_total_bytes=1), 1.0)
    text = "\n".join(plain(line) for line in work_panes.host(state, 60, 8))
    assert "gpu0 612/700 W 67°" in text
    assert "98.0 GB of 141 GB" in text
    assert "power cap" in text
    assert "▓▓▓▓▓" in text or "█████" in text
    assert "no GPU" not in text
    assert "no GPU on this host" in "\n".join(
        plain(x) for x in work_panes.host(replay("done"), 38, 8)
    )


def test_quality_says_what_is_admitted_and_why_not() -> None:
    text = "\n".join(plain(line) for line in work_panes.quality(replay("generate"), 58, 9))
    assert "admitted 110 of 118" in text
    assert "93.2%" in text
    assert "2 keep, 1 filter" in text
    assert "rate_limited harrier" in text
    zoomed = "\n".join(plain(line) for line in work_panes.quality(replay("generate"), 116, 20))
    assert "2.0e-05" in zoomed
    wire = "\n".join(plain(line) for line in work_panes.quality(replay("tripped"), 58, 9))
    assert "▲ trigger_rate" in wire


def test_training_shows_curve_accuracy_and_acceptance() -> None:
    text = "\n".join(plain(line) for line in work_panes.training(replay("done"), 58, 10))
    assert "loss 1." in text
    assert "step 400/400" in text
    assert "1▇86%" in text
    assert "acceptance 2.87" in text
    assert "untrained 1.01 · decoded 2.87" in text
    before = "\n".join(plain(line) for line in work_panes.training(replay("generate"), 58, 8))
    assert "starts after extract" in before
    assert "declared" in before


def test_material_tells_open_from_lost_and_gives_the_rebuild_the_last_word() -> None:
    state = ConsoleState("r")
    for n, verdict in enumerate(["consistent", "unverifiable", "unverifiable", "rejected"], 1):
        state.apply(
            ev.Outcome(
                seq=n,
                prompt_id=f"p{n}",
                dataset="mine",
                arm="declared",
                backend="openrouter",
                outcome="ok",
                verdict=verdict,
                completion_tokens=7,
            ),
            1.0,
        )
    cut = msgspec.structs.replace(state.view.outcomes[0], seq=5, outcome="aborted", verdict=None)
    state.apply(cut, 1.0)
    shown = [plain(line) for line in work_panes.training(state, 56, 8)]
    assert "from 5 outcomes" in shown[1]
    assert shown[2].split() == ["dataset", "arm", "kept", "open", "lost", "calls", "tokens"]
    assert shown[3].split() == ["mine", "declared", "1", "2", "1", "0", "7"]
    many = ConsoleState("r")  # more than a reader keeps
    many.view.outcomes = state.view.outcomes * 400
    assert "material of the last 2,000 outcomes" in plain(work_panes.training(many, 56, 8)[1])
    verdicts = {"consistent": 3, "rejected": 1}
    state.apply(ev.StageFinished(seq=9, stage="reconstruct", summary={"verdicts": verdicts}), 1.0)
    shown = [plain(line) for line in work_panes.training(state, 56, 8)]
    assert "the rebuild kept 3 of 4" in shown[1]


@pytest.mark.parametrize("width", [54, 56, 74, 116])
def test_the_audit_table_never_cuts_its_decisions(width: int) -> None:
    rows = [
        ev.AuditRow(
            dataset="calls",
            provider="birch/int4",
            arm="declared",
            samples=66,
            decision="regenerate",
        )
    ]
    state = ConsoleState("r")
    state.apply(ev.Stats(seq=1, verdicts={"exact": 66}), 1.0)
    state.apply(ev.Audit(seq=2, rows=rows), 1.0)
    header, row = (plain(line) for line in work_panes.quality(state, width, 14)[-2:])
    assert header.rstrip().endswith("decision")
    assert row.rstrip().endswith("regenerate")
    assert ("birch/int4" in row) == (width > 54)


def test_an_error_flood_stays_in_its_box() -> None:
    rows = [
        ev.ErrorRow(
            provider=f"p{i}\x1b[31m",
            error_class=f"class_{i}",
            count=i,
            example=recording.HOSTILE * 50,
        )
        for i in range(2_000)
    ]
    state = ConsoleState("r")
    state.apply(ev.Stats(seq=1, errors=rows, verdicts={"rejected": 2_000}), 1.0)
    lines = [plain(line) for line in work_panes.quality(state, 58, 9)]
    assert len(lines) == 9
    assert "class_1999" in lines[4]
    assert "more kinds" in lines[-1]
    assert not any(obeyed(line) for line in lines)
