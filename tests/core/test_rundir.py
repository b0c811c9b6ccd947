"""Run creation and its refusals, manifest, heartbeat, finding runs, samples as parquet."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from core.config import Config, parse
from core.errors import StoreError, UsageError
from core.halting import engine_pid, process_started
from core.schema import Sample, Segment, ToolCall
from core.store import (
    RunDir,
    Status,
    create_run,
    find_run,
    list_runs,
    make_manifest,
    observed_status,
    read_manifest,
    read_samples,
    read_status,
    write_manifest,
    write_samples,
    write_status,
)
from tests.faults.rig import wait_for


def config(**run: object) -> Config:
    return parse({"run": {"min_free_disk_bytes": 1, **run}}, "test")


def test_a_new_run_has_its_config_and_manifest(tmp_path: Path) -> None:
    wanted = config(seed=7, budget_usd=1.5)
    run = create_run(wanted, tmp_path, "alpha", ["eyas", "run"])
    assert run.path == tmp_path / "runs" / "alpha"
    assert run.load_config() == wanted
    manifest = read_manifest(run)
    assert manifest is not None
    assert (manifest.run_id, manifest.argv, manifest.pid, manifest.lives) == (
        "alpha", ["eyas", "run"], 0, 0,
    )  # fmt: skip
    assert manifest.versions["msgspec"] == msgspec.__version__
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == ["alpha"]


def test_lives_are_counted(tmp_path: Path) -> None:
    run = create_run(config(), tmp_path, "alpha")
    for life in (1, 2):
        write_manifest(run, make_manifest(run, config(), []))
        manifest = read_manifest(run)
        assert manifest and manifest.lives == life and manifest.pid == os.getpid()


@pytest.mark.parametrize("run_id", ["..", "a/b", "a b", "x" * 81, "\x1b[31m"])
def test_unusable_ids_are_refused(tmp_path: Path, run_id: str) -> None:
    with pytest.raises(UsageError, match="run id"):
        create_run(config(), tmp_path, run_id)
    assert list(tmp_path.iterdir()) == []


def test_an_occupied_id_is_refused_and_untouched(tmp_path: Path) -> None:
    run = create_run(config(seed=1), tmp_path, "alpha")
    before = run.config_toml.read_bytes()
    with pytest.raises(UsageError, match=r"taken; `eyas resume alpha`") as caught:
        create_run(config(seed=2), tmp_path, "alpha")
    assert "\n" not in str(caught.value)
    assert run.config_toml.read_bytes() == before


def test_too_little_space_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="GB free"):
        create_run(config(min_free_disk_bytes=1 << 62), tmp_path, "alpha")
    assert list((tmp_path / "runs").iterdir()) == []


def test_no_write_permission_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file where the folder should be")
    with pytest.raises(StoreError, match="cannot be created") as caught:
        create_run(config(), tmp_path, "alpha")
    assert "\n" not in str(caught.value)


def test_runs_are_found_by_path_id_and_unique_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("alpha", "albert", "beta"):
        create_run(config(), tmp_path, name)
    monkeypatch.setenv("EYAS_RUNS", str(tmp_path / "runs"))
    assert find_run("beta").run_id == "beta"
    assert find_run("be").run_id == "beta"
    assert find_run(str(tmp_path / "runs" / "alpha")).run_id == "alpha"
    with pytest.raises(UsageError, match="2 runs"):
        find_run("al")
    with pytest.raises(UsageError, match="no such run"):
        find_run("gamma")
    with pytest.raises(UsageError, match="no such run"):
        find_run("")
    assert {r.run_id for r in list_runs()} == {"alpha", "albert", "beta"}


def test_a_dead_engine_is_seen(tmp_path: Path) -> None:
    run = create_run(config(), tmp_path, "alpha")
    write_status(run, Status(run_id="alpha", state="running", ts=100.0))
    assert read_status(run) == Status(run_id="alpha", state="running", ts=100.0)
    assert observed_status(run).state == "crashed"  # the manifest names no engine
    write_manifest(run, make_manifest(run, config(), []))
    assert observed_status(run).state == "running"
    manifest = read_manifest(run)
    assert manifest is not None
    write_manifest(run, msgspec.structs.replace(manifest, boot_id="elsewhere"))
    assert observed_status(run, now=101.0).state == "running"
    assert observed_status(run, now=120.0).state == "stale"
    write_status(run, Status(run_id="alpha", state="done"))
    assert observed_status(run).state == "done"


def test_a_zombie_and_a_number_given_again_are_not_the_engine(tmp_path: Path) -> None:
    run = create_run(config(), tmp_path, "alpha")
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = process_started(child.pid)
    manifest = msgspec.structs.replace(
        make_manifest(run, config(), []), pid=child.pid, pid_started=started
    )
    write_manifest(run, manifest)
    assert started > 0 and engine_pid(run.path) == child.pid
    write_manifest(run, msgspec.structs.replace(manifest, pid_started=started - 1))
    assert engine_pid(run.path) == 0
    write_manifest(run, manifest)
    assert child.stdin is not None
    child.stdin.close()
    wait_for(lambda: engine_pid(run.path) == 0, "the child to become a zombie")
    child.wait()
    assert process_started(child.pid) == 0


def sample(i: int, text: str = "{}") -> Sample:
    return Sample(
        sample_id=f"s{i}",
        prompt_id=f"s{i}",
        twin_id=f"t{i}",
        dataset="d",
        arm="declared",
        backend="openrouter",
        provider="p" if i % 2 else None,
        token_ids=[1, 2, 3, i],
        prompt_len=2,
        verdict="exact" if i % 2 else "rejected",
        error_class=None if i % 2 else "count_mismatch",
        flags=["trimmed"] if i % 3 else [],
        calls=[ToolCall(id="functions.f:0", name="f", arguments=text)],
        segments=[Segment(kind="content", start=0, end=2)],
        finish_reason="stop",
        cost_usd=0.25,
    )


def test_samples_come_back_equal_and_replace_earlier_ones(tmp_path: Path) -> None:
    run = create_run(config(), tmp_path, "alpha")
    wanted = [sample(i) for i in range(2_500)]
    assert write_samples(run, wanted) == 2_500
    assert list(read_samples(run)) == wanted
    first = {p.name: p.read_bytes() for p in run.samples.iterdir()}
    write_samples(run, wanted)
    assert {p.name: p.read_bytes() for p in run.samples.iterdir()} == first
    write_samples(run, wanted[:3])
    assert list(read_samples(run)) == wanted[:3]
    assert write_samples(run, []) == 0
    assert list(read_samples(run)) == []


def test_a_damaged_file_of_samples_is_one_line(tmp_path: Path) -> None:
    run = create_run(config(), tmp_path, "alpha")
    (run.samples / "000000.parquet").write_bytes(b"PAR1 cut")
    with pytest.raises(StoreError, match=r"000000\.parquet: rebuild it \(eyas stage reconstruct\)"):
        list(read_samples(run))


def test_some_columns_are_enough_for_counting(tmp_path: Path) -> None:
    run = create_run(config(), tmp_path, "alpha")
    write_samples(run, [sample(i) for i in range(4)])
    rows = list(read_samples(run, ["verdict"]))
    assert [r.verdict for r in rows] == ["rejected", "exact", "rejected", "exact"]
    assert [r.sample_id for r in rows] == ["s0", "s1", "s2", "s3"]
    assert rows[0].token_ids == [] and rows[0].prompt_len == 2


def test_hostile_text_in_samples(tmp_path: Path) -> None:
    run = create_run(config(), tmp_path, "alpha")
    hostile = msgspec.structs.replace(sample(1, '{"a": "\ud800\x00"}'), finish_reason="st\ud800p")
    write_samples(run, [hostile])
    (back,) = read_samples(run)
    assert back.calls == hostile.calls
    assert back.finish_reason == "st\\ud800p"


def test_run_dir_names() -> None:
    run = RunDir(Path("runs/x"))
    assert run.run_id == "x"
    assert run.completions == Path("runs/x/completions.jsonl")
