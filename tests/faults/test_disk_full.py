"""A disk that fills up while answers arrive: no partial line, no lost answer, a state that says
why, and a resume."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from core.store import RunDir
from tests.faults.rig import ROOT, Gateway, check

UNSHARE = ["unshare", "-rm"]


def may_mount() -> bool:
    try:
        return subprocess.run([*UNSHARE, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not may_mount(), reason="no mount namespace for this user (unshare -rm)")
def test_disk_full_halts_keeps_every_answer_and_resumes(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    gateway = Gateway(tmp_path, "--seed", "9")
    try:
        arguments = [
            "-m",
            "tests.faults.disk_full",
            str(disk),
            str(tmp_path / "gateway-ready.json"),
        ]
        done = subprocess.run(
            [*UNSHARE, sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT
        )
        assert done.returncode == 0, done.stderr
        bill = gateway.bill()
    finally:
        gateway.close()
    seen = json.loads(done.stdout)
    assert seen["code"] == 3 and seen["state"] == "halted" and "no space left" in seen["reason"]
    assert not seen["partial_line_left"] and 0 < seen["replies"] < 80
    assert seen["resumed"] == 0
    books = check(RunDir(tmp_path / "kept"), bill)
    assert books.outcomes.total() == 80
    assert books.uncertain == 0 and books.spent_usd == pytest.approx(books.billed_usd, abs=1e-9)
