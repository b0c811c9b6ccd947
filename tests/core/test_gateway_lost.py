"""A run whose own gateway dies stops and says so; what was left is asked by the next engine."""

import json
import os
import signal
from pathlib import Path

from core.config import parse
from core.store import read_status
from tests.faults.rig import Engine, new_run, wait_for


def test_a_run_does_not_outlive_its_gateway(tmp_path: Path) -> None:
    raw = {
        "run": {"min_free_disk_bytes": 1, "stages": ["generate"]},
        "dataset": [
            {"name": "talk", "kind": "embedded", "limit": 48, "families": ["lists", "arithmetic"]}
        ],
        "generate": {
            "max_in_flight": 4,
            "max_tokens": 200,
            "canary": 0,
            "openrouter": {"base_url": "", "model": "eyas/embedded"},
        },
        "tripwires": {"enabled": False},
    }
    run = new_run(parse(raw, "test"), tmp_path, "orphan")
    engine = Engine(run)
    wait_for(lambda: run.completions.exists() and run.completions.stat().st_size > 0, "a reply")
    os.kill(json.loads((run.path / "gateway" / "ready.json").read_bytes())["pid"], signal.SIGKILL)
    assert engine.wait() == 1
    status = read_status(run)
    assert status is not None and (status.state, status.exit_code) == ("failed", 1)
    assert status.reason == (
        f"embedded gateway: ended with code {-signal.SIGKILL} while it was needed; "
        f"`eyas resume {run.run_id}` starts another"
    )
    assert 0 < status.done < 48 and status.failed == 0
    assert Engine(run).wait() == 0
    last = read_status(run)
    assert last is not None and (last.done, last.ok, last.failed) == (48, 48, 0)
    outcomes = [json.loads(line) for line in run.completions.read_bytes().splitlines()]
    kept = [r["prompt_id"] for r in outcomes if r["outcome"] == "ok"]
    assert len(kept) == len(set(kept)) == 48
