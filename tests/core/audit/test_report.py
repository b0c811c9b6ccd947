"""The stage on a run directory, decisions carried out, and the account of a run."""

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from core import config
from core import events as ev
from core.audit import record
from core.audit import report as stage
from core.audit.account import report, thin
from core.audit.apply import apply, crc, marked, marks
from core.audit.exactness import Pair, Side
from core.errors import Halted, StoreError, UsageError
from core.halting import boot_id
from core.schema import (
    AcceptanceCounts,
    EvalReport,
    Finding,
    Prompt,
    Rollout,
    Sample,
    SpendLine,
    Usage,
)
from core.store import (
    Manifest,
    RunDir,
    encode_line,
    only_one,
    read_jsonl,
    read_samples,
    write_manifest,
    write_samples,
)
from tests.core.audit.builders import RENDERER, WEATHER, call, prompt, sample

SETTINGS = config.Config(
    dataset=[config.Dataset(name=n, kind="embedded") for n in ("b1", "b2")],
    audit=config.Audit(min_pairs=10),
)


@pytest.fixture(autouse=True)
def bytes_as_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("core.audit.report", "core.audit.apply"):
        monkeypatch.setattr(f"{module}.renderer_of", lambda _: RENDERER)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "r1")
    made.path.mkdir()
    write_manifest(made, Manifest(run_id="r1", host="here", created_at=1.0))
    made.config_toml.write_text(config.dump(SETTINGS))
    return made


def fill(run: RunDir, rows: list[tuple[Prompt, Sample]]) -> None:
    """Prompts, one completion each, and their samples."""
    run.prompts.write_bytes(b"".join(encode_line(p) for p, _ in rows))
    run.completions.write_bytes(b"".join(encode_line(_rollout(p, s)) for p, s in rows))
    write_samples(run, [s for _, s in rows])


def _rollout(p: Prompt, s: Sample) -> Rollout:
    return Rollout(
        prompt_id=p.prompt_id,
        twin_id=p.twin_id,
        dataset=p.dataset,
        arm=p.arm,
        attempt=1,
        outcome="rejected" if s.verdict == "rejected" else "ok",
        error_class=s.error_class,
        backend=s.backend,
        provider=s.provider,
        usage=Usage(cost_usd=s.cost_usd),
    )


def pair(i: int, dataset: str = "b1", **api: Any) -> list[tuple[Prompt, Sample]]:
    """One question through the local arm and through provider Alpha."""
    found = []
    for arm in ("local", "declared"):
        name = f"{dataset}-{arm}-{i}"
        ids = {"prompt_id": name, "twin_id": f"{dataset}-t{i}", "dataset": dataset, "arm": arm}
        backend = "sglang" if arm == "local" else "openrouter"
        fields: dict[str, Any] = {**ids, "sample_id": name, "backend": backend, "cost_usd": 0.01}
        fields |= {"provider": None, "verdict": "exact", "cost_usd": 0.0} if arm == "local" else api
        found.append((prompt([WEATHER], backend=backend, **ids), sample(**fields)))
    return found


def audit(run: RunDir, **kwargs: Any) -> tuple[dict[str, Any], list[ev.Event]]:
    events: list[ev.Event] = []
    return stage.run(run, SETTINGS, events.append, lambda: False, **kwargs), events


def test_a_clean_run(run: RunDir) -> None:
    fill(run, [row for i in range(12) for row in pair(i)])
    summary, events = audit(run)
    assert summary == {
        "samples": 24,
        "trainable": 24,
        "findings": 0,
        "rebuilt_exactly": None,
        "decisions": {"b1": "keep"},
    }
    (event,) = events
    assert isinstance(event, ev.Audit)
    assert [(r.dataset, r.provider, r.arm, r.samples, r.decision) for r in event.rows] == [
        ("b1", "Alpha", "declared", 12, "keep"),
        ("b1", "sglang", "local", 12, "keep"),
    ]
    assert event.rows[0].trigger_rate == event.rows[0].reference_rate == 0.0
    assert event.exactness["samples"] == 0 and "rate" not in event.exactness
    assert list(read_jsonl(run.findings, Finding)) == []
    saved = record.load_audit(run)
    assert saved.verdicts == {"Alpha": {"consistent": 12}, "sglang": {"exact": 12}}
    assert saved.decisions[0].judged


def test_the_same_run_has_the_same_audit(run: RunDir) -> None:
    fill(run, [row for i in range(12) for row in pair(i, calls=[call("{}")])])
    audit(run)
    first = run.audit.read_bytes(), run.findings.read_bytes()
    audit(run)
    assert first == (run.audit.read_bytes(), run.findings.read_bytes())


def test_a_provider_that_calls_where_the_local_arm_does_not(run: RunDir) -> None:
    fill(run, [row for i in range(12) for row in pair(i, calls=[call()])])
    summary, events = audit(run)
    assert summary["decisions"] == {"b1": "regenerate"}
    row = events[-1].rows[0]  # type: ignore[attr-defined]
    assert (row.trigger_rate, row.reference_rate, row.decision) == (1.0, 0.0, "regenerate")
    assert row.p_value == pytest.approx(2 / 2**12)


def test_stopping_leaves_the_old_files(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(run, [row for i in range(3) for row in pair(i)])
    audit(run)
    before = (
        run.findings.read_bytes(),
        run.audit.read_bytes(),
        sorted(p.name for p in run.path.iterdir()),
    )
    monkeypatch.setattr("core.audit.report.EVERY", 2)
    with pytest.raises(Halted):
        stage.run(run, SETTINGS, lambda _: None, lambda: True)
    after = (
        run.findings.read_bytes(),
        run.audit.read_bytes(),
        sorted(p.name for p in run.path.iterdir()),
    )
    assert before == after


def test_bad_files_are_named(run: RunDir) -> None:
    with pytest.raises(StoreError, match=r"prompts\.jsonl: cannot be read"):
        audit(run)
    rows = pair(0)
    fill(run, rows)
    run.prompts.write_bytes(encode_line(rows[0][0]) + b"{}\n")
    with pytest.raises(StoreError, match=r"prompts\.jsonl:2: not a prompt"):
        audit(run)
    run.prompts.write_bytes(encode_line(rows[0][0]))
    with pytest.raises(StoreError, match=r"b1-declared-0: its prompt is not in"):
        audit(run)
    with pytest.raises(StoreError, match="run `eyas stage audit"):
        apply(run, "keep")


def test_a_prompt_that_utf8_cannot_hold_stops_nobody(run: RunDir) -> None:
    rows = pair(0)
    fill(run, rows)
    odd = msgspec.structs.replace(
        rows[0][0], prompt_id="odd", messages=[{"role": "user", "content": "a\ud800<|im_end|>"}]
    )
    run.prompts.write_bytes(b"".join(encode_line(p) for p, _ in rows) + encode_line(odd))
    assert rb"\ud800" in run.prompts.read_bytes()
    assert stage._prompts(run)["odd"].quoted == {"<|im_end|>"}
    audit(run)


def test_log_probabilities_when_there_are_some(run: RunDir) -> None:
    fill(run, [row for i in range(12) for row in pair(i)])

    def logprobs(one: Sample) -> list[float] | None:
        if one.arm == "local":
            return [-1.0] * len(one.completion_ids)
        values = [-1.5] * len(one.completion_ids)
        values[0] = -30.0
        return values

    summary, _ = audit(run, logprobs=logprobs)
    assert summary["decisions"] == {"b1": "regenerate"}
    found = list(read_jsonl(run.findings, Finding))
    assert {f.rule for f in found} == {"absurd_edge"} and len(found) == 12
    saved = record.load_audit(run)
    assert saved.likelihood
    by_segment = {t.segment: t for t in saved.semantics.comparisons[0].likelihood}
    assert by_segment["content"].shift_nats == pytest.approx(-0.5)
    summary, _ = audit(run, logprobs=lambda _: None)
    assert summary["decisions"] == {"b1": "keep"}


TEXTS = ("reasoning", "content", "call_id", "arguments")


def side(one: Sample) -> Side:
    return Side(one.completion_ids, one.segments)


def test_exactness_by_segment(run: RunDir) -> None:
    """One reply told right, one with a trimmed thought, one that lost its call, one that is not
    canonical."""
    true = sample(reasoning=" ab", content="c", calls=[call()], relative=True)
    trimmed = sample(reasoning="ab", content="c", calls=[call()], relative=True)
    lost = sample(reasoning=" ab", content="c", relative=True)
    odd = sample(reasoning="\xe9", content="c", relative=True)
    ids = [0xFF if t == 0xC3 else t for t in odd.completion_ids]
    pairs = [
        Pair(side(true), side(true), True, True),
        Pair(side(true), side(trimmed), True, True),
        Pair(side(true), side(lost), False, False),
        Pair(Side(ids, odd.segments), side(odd), False, False),
    ]
    fill(run, [row for i in range(3) for row in pair(i)])
    summary, events = audit(run, truths=lambda prompts: [p for p in pairs if len(prompts) == 6])
    assert summary["rebuilt_exactly"] == 0.25
    found = record.load_audit(run).exactness
    assert (found.samples, found.exact, found.with_text) == (4, 1, 2)
    assert (found.consistent, found.false) == (2, 1)
    assert (found.low, found.high) == pytest.approx((0.0456, 0.6994), abs=1e-4)
    assert set(found.kinds) == {*TEXTS, "edges", "structure"}
    reasoning = found.kinds["reasoning"]
    assert (reasoning.segments, reasoning.exact, reasoning.canonical) == (4, 2, 3)
    assert (reasoning.compared, reasoning.same_text) == (2, 1)
    assert (reasoning.tokens, reasoning.exact_tokens) == (11, 6)
    assert (reasoning.low, reasoning.high) == pytest.approx((0.1500, 0.8500), abs=1e-4)
    assert (found.kinds["arguments"].segments, found.kinds["arguments"].exact) == (3, 2)
    assert (found.kinds["structure"].segments, found.kinds["structure"].exact) == (4, 3)
    edges = found.kinds["edges"]
    # Lost: the first token of two thoughts, and both ends of the lost call's id and arguments.
    assert (edges.segments, edges.exact) == (28, 28 - 2 - 4)
    event = events[-1]
    assert isinstance(event, ev.Audit)
    assert event.exactness["reasoning"]["rate"] == 0.5
    assert event.exactness["rate"] == 0.25 and event.exactness["false"] == 1


def mixed(run: RunDir) -> None:
    """Ten good pairs, one call with broken arguments, one with a foreign id (a mask cures it)."""
    rows = [row for i in range(10) for row in pair(i)]
    rows += pair(10, calls=[call("{}")]) + pair(11, calls=[call(id="call_1")])
    fill(run, rows)
    audit(run)


def test_filter_drops_and_keep_brings_back(run: RunDir) -> None:
    mixed(run)
    done = apply(run, "filter")
    assert (done["samples"], done["paid_usd"]) == (2, 0.02)
    dropped = {s.sample_id: s.dropped for s in read_samples(run) if s.dropped}
    assert dropped == {"b1-declared-10": "arguments_schema", "b1-declared-11": "id_not_native"}
    assert sum(s.trainable for s in read_samples(run)) == 22
    assert sum(1 for _ in read_samples(run)) == 24
    assert sum(s.trainable for s in read_samples(run, ["verdict"])) == 22
    summary, _ = audit(run)
    assert summary["trainable"] == 22 and summary["decisions"] == {"b1": "keep"}
    assert [a["decision"] for a in record.load_audit(run).applied] == ["filter"]
    apply(run, "keep")
    assert sum(s.trainable for s in read_samples(run)) == 24
    assert marks(run) == {}


def test_apply_and_an_engine_keep_each_other_out(run: RunDir) -> None:
    """An engine holds the lock before the manifest names it."""
    mixed(run)
    with only_one(run), pytest.raises(StoreError, match="an engine of this run is alive"):
        apply(run, "filter")
    assert marks(run) == {}
    assert apply(run, "filter")["samples"] == 2
    with only_one(run):  # given back
        pass


def test_mask_takes_the_positions_of_a_foreign_id(run: RunDir) -> None:
    mixed(run)
    done = apply(run, "mask")
    assert (done["samples"], done["tokens"]) == (1, len("call_1"))
    (one,) = [s for s in read_samples(run) if s.masked]
    assert bytes(one.token_ids[i] for i in one.masked) == b"call_1"
    assert one.trainable and not any(one.loss_mask[i] for i in one.masked)
    assert sum(one.loss_mask) == len(one.completion_ids) - 6
    share = 6 / len(one.completion_ids)
    assert done["paid_usd"] == pytest.approx(0.01 * share)
    apply(run, "filter")  # both kinds of mark live side by side
    both = {s.sample_id for s in read_samples(run) if s.masked and s.dropped}
    assert both == {"b1-declared-11"}


def test_mask_takes_the_edges_of_a_trimming_provider(run: RunDir) -> None:
    rows = [row for i in range(20) for row in pair(i, reasoning="Look it up.")]
    fill(run, rows)
    summary, _ = audit(run)
    assert summary["decisions"] == {"b1": "mask"}
    done = apply(run, "mask")
    assert (done["samples"], done["tokens"]) == (20, 80)
    assert done["tokens"] == record.load_audit(run).decisions[0].costs["mask"].tokens
    for one in read_samples(run):
        assert len(one.masked) == (0 if one.arm == "local" else 4)


def test_regenerate_sets_replies_aside(run: RunDir) -> None:
    good, bad = [row for i in range(12) for row in pair(i, "b2")], []
    for i in range(12):
        bad += pair(i, calls=[call()])
    fill(run, good + bad)
    run.spend.write_bytes(b'{"kept":"as it is"}\n')
    audit(run)
    before = sorted(run.completions.read_bytes().splitlines())
    done = apply(run, "regenerate")
    assert (done["pending"], done["datasets"], done["samples"]) == (12, ["b1"], 12)
    assert done["paid_usd"] == pytest.approx(0.12)
    assert done["advice"] == "add 'Alpha' to generate.openrouter.ignore, then eyas resume r1"
    side = run.path / "completions.1.regenerated.jsonl"
    moved = [r.prompt_id for r in read_jsonl(side, Rollout)]
    assert moved == [f"b1-declared-{i}" for i in range(12)]
    kept = run.completions.read_bytes().splitlines()
    assert sorted(kept + side.read_bytes().splitlines()) == before
    assert {s.sample_id for s in read_samples(run)} & set(moved) == set()
    assert run.spend.read_bytes() == b'{"kept":"as it is"}\n'
    with pytest.raises(UsageError, match="nothing to ask again"):
        apply(run, "regenerate")


def test_regenerate_by_name_takes_the_offenders(run: RunDir) -> None:
    mixed(run)
    with pytest.raises(UsageError, match="asks for it nowhere"):
        apply(run, "regenerate")
    done = apply(run, "regenerate", ["b1"])
    assert done["pending"] == 2 and done["advice"] == "eyas resume r1"


def test_lines_that_cannot_be_read_stay_where_they_are(run: RunDir) -> None:
    rows = [row for i in range(12) for row in pair(i, calls=[call()])]
    fill(run, rows)
    surrogate = b'{"prompt_id":"b1-declared-0","reply_raw":"\\ud83d"}\n'
    run.completions.write_bytes(run.completions.read_bytes() + surrogate + b"torn{\n")
    audit(run)
    apply(run, "regenerate")
    assert run.completions.read_bytes().endswith(b"torn{\n")
    side = (run.path / "completions.1.regenerated.jsonl").read_bytes()
    assert surrogate in side and surrogate not in run.completions.read_bytes()


def test_apply_refuses(run: RunDir) -> None:
    mixed(run)
    with pytest.raises(UsageError, match="use keep, mask, filter, regenerate"):
        apply(run, "delete")
    with pytest.raises(UsageError, match="'b9': not in this run"):
        apply(run, "filter", ["b9"])
    write_manifest(run, Manifest(run_id="r1", pid=os.getpid(), boot_id=boot_id()))
    with pytest.raises(StoreError, match="halt it first"):
        apply(run, "filter")


def test_marks_lie_over_rebuilt_samples(run: RunDir) -> None:
    mixed(run)
    apply(run, "mask")
    by_sample = marks(run)
    plain = [msgspec.structs.replace(s, masked=[], dropped="") for s in read_samples(run)]
    again = list(marked(plain, by_sample))
    assert again == list(read_samples(run))
    (name,) = by_sample
    changed = [
        msgspec.structs.replace(s, token_ids=[*s.token_ids, 1]) if s.sample_id == name else s
        for s in plain
    ]
    (odd,) = [s for s in marked(changed, by_sample) if s.dropped]
    assert odd.sample_id == name and odd.dropped == "rebuilt differently since it was audited"
    assert crc(plain[0]) == crc(plain[0]) != crc(changed[-1])


def test_the_account_adds_up(run: RunDir) -> None:
    rows = [row for i in range(12) for row in pair(i, calls=[call()])]
    lost = pair(12, verdict="rejected", error_class="truncated_length", cost_usd=0.02)[1]
    fill(run, [*rows, lost])
    failed = Rollout(
        prompt_id="x",
        twin_id="x",
        dataset="b1",
        arm="declared",
        attempt=2,
        outcome="failed",
        error_class="rate_limited",
        error="<b>slow</b>",
        backend="openrouter",
        provider="Beta",
    )
    run.completions.write_bytes(run.completions.read_bytes() + encode_line(failed))
    books = [
        SpendLine(ts=10.0, kind="dispatch", prompt_id="a", attempt=1, backend="openrouter"),
        SpendLine(
            ts=12.0,
            kind="billed",
            prompt_id="a",
            attempt=1,
            backend="openrouter",
            provider="Alpha",
            cost_usd=0.5,
        ),
        SpendLine(
            ts=12.0,
            kind="dispatch",
            prompt_id="b",
            attempt=1,
            backend="openrouter",
            provider="Beta",
        ),
        SpendLine(
            ts=15.0, kind="uncertain", prompt_id="b", attempt=1, backend="openrouter", cost_usd=0.25
        ),
        SpendLine(ts=16.0, kind="dispatch", prompt_id="c", attempt=1, backend="openrouter"),
        SpendLine(ts=17.0, kind="free", prompt_id="c", attempt=1, backend="openrouter"),
        SpendLine(ts=18.0, kind="dispatch", prompt_id="d", attempt=1, backend="openrouter"),
    ]
    run.spend.write_bytes(b"".join(encode_line(line) for line in books))
    walk = AcceptanceCounts(
        steps=100, tokens=250, accepted_by_position=[80, 50, 20], offered_by_position=[100, 80, 50]
    )
    served = AcceptanceCounts(
        steps=100, tokens=190, accepted_by_position=[], offered_by_position=[]
    )
    run.eval.write_bytes(
        msgspec.json.encode(
            EvalReport(checkpoint="c", draft_tokens=3, prompts=9, walk=walk, decoded=served)
        )
    )
    audit(run)
    data = report(run)
    made, spent = data["made"], data["spent"]
    assert (made["prompts"], made["finished"], made["samples"], made["trainable"]) == (
        25,
        26,
        25,
        24,
    )
    assert [r["outcomes"] for r in made["table"]] == [
        {"failed": 1, "ok": 12, "rejected": 1},
        {"ok": 12},
    ]
    assert made["lost"] == [
        {"class": "rate_limited", "count": 1, "by_provider": {"Beta": 1}, "example": "<b>slow</b>"},
        {"class": "truncated_length", "count": 1, "by_provider": {"Alpha": 1}, "example": ""},
    ]
    assert (spent["total_usd"], spent["uncertain_usd"], spent["open"]) == (0.75, 0.25, 1)
    assert spent["by_provider"] == [
        {"provider": "Alpha", "usd": 0.5, "replies": 1},
        {"provider": "Beta", "usd": 0.25, "replies": 1},
    ]
    assert spent["curve"] == [[2.0, 0.5], [5.0, 0.75]]
    assert spent["usd_per_million_kept"] == pytest.approx(1e6 * 0.75 / made["trainable_tokens"])
    assert data["drafter"]["walk"]["acceptance_length"] == 2.5
    assert data["drafter"]["walk"]["rate_by_position"] == [0.8, 0.625, 0.4]
    assert [w.split(":")[0].split(" ")[0] for w in data["warnings"]] == [
        "1",
        "$0.2500",
        "acceptance",
        "b1",
    ]
    json.dumps(data)


def test_a_correction_by_the_account_belongs_to_the_uncertain_ones(run: RunDir) -> None:
    def line(kind: Any, usd: float, provider: str | None = None, name: str = "a") -> SpendLine:
        return SpendLine(
            ts=1.0,
            kind=kind,
            prompt_id=name,
            attempt=1,
            backend="openrouter",
            provider=provider,
            cost_usd=usd,
            cap_usd=usd,
        )

    books = [
        line("account", 0.0, name=""),
        line("billed", 0.5, "Alpha"),
        line("uncertain", 0.3, "Alpha"),
        line("uncertain", 0.1, "Beta"),
        line("adjusted", -0.2, name=""),
        line("uncertain", 0.25, "Beta"),
    ]
    run.spend.write_bytes(b"".join(encode_line(one) for one in books))
    spent = report(run)["spent"]
    assert spent["total_usd"] == pytest.approx(0.95) == spent["cap_usd"]
    assert spent["uncertain_usd"] == 0.25
    assert {r["provider"]: r["usd"] for r in spent["by_provider"]} == {
        "Alpha": pytest.approx(0.65),
        "Beta": pytest.approx(0.30),
    }
    assert [usd for _, usd in spent["curve"]] == pytest.approx([0.5, 0.8, 0.9, 0.7, 0.95])


def test_an_account_of_almost_nothing(run: RunDir) -> None:
    data = report(run)
    assert data["made"]["samples"] == 0 and data["warnings"] == []
    assert "audit" not in data and "drafter" not in data and "training" not in data
    (run.manifest).unlink()
    with pytest.raises(StoreError, match=r"no run\.json"):
        report(run)


def test_thin_keeps_both_ends() -> None:
    points = [[float(i), 0.0] for i in range(1000)]
    got = thin(points, 10)
    assert len(got) == 10 and got[0] == points[0] and got[-1] == points[-1]
    assert thin(points[:3], 10) == points[:3]
