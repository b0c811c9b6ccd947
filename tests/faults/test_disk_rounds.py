"""Case C75 on three disks, of the three ways to be full: the short form of `python -m
tests.faults.disk_rounds`."""

import subprocess
import sys

import pytest

from core.errors import EXIT_HALTED
from tests.faults.rig import ROOT

UNSHARE = ["unshare", "-rm"]


def may_mount() -> bool:
    try:
        return subprocess.run([*UNSHARE, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not may_mount(), reason="no mount namespace for this user (unshare -rm)")
def test_a_disk_that_fills_up_at_a_random_moment_loses_nothing() -> None:
    command = [sys.executable, "-m", "tests.faults.disk_rounds", "--inside", "--rounds", "3"]
    done = subprocess.run([*UNSHARE, *command], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2_000:]
    rows = [line.split() for line in done.stdout.splitlines()[1:4]]
    assert [r[1] for r in rows] == ["small", "filled", "inodes"]
    assert done.stdout.count(f" {EXIT_HALTED} ") >= 2
    assert "none lost, none asked again" in done.stdout
