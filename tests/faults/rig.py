"""A run against a gateway that outlives it: start both, kill the engine, compare the books with the
bill."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from core.config import Config, parse
from core.schema import Prompt, SpendLine
from core.store import RunDir, create_run, read_jsonl

ROOT = Path(__file__).resolve().parents[2]
CLOSING = ("billed", "looked_up", "uncertain", "free")


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 90.0) -> None:
    """Poll until true. A time-out is a failed test, not a slow one: nothing here takes a tenth of
    it."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"timed out waiting for {what}"
        time.sleep(0.01)


class Gateway:
    """The embedded gateway as a process of its own."""

    def __init__(self, folder: Path, *options: str) -> None:
        ready = folder / "gateway-ready.json"
        command = [sys.executable, "-m", "core", "gateway", "--port", "0", "--ready", str(ready)]
        command += ["--exit-with-stdin", "--threads", "1", *options]
        with (folder / "gateway.err").open("ab") as errors:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=errors, stderr=errors, cwd=ROOT
            )
        wait_for(lambda: ready.exists() or self.process.poll() is not None, "the gateway")
        assert self.process.poll() is None, "the gateway did not start"
        self.address: dict[str, Any] = json.loads(ready.read_bytes())

    def get(self, path: str) -> Any:
        url = f"http://127.0.0.1:{self.address['port']}{path}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return json.loads(answer.read())

    def post(self, path: str, text: str) -> None:
        url = f"http://127.0.0.1:{self.address['port']}{path}"
        with urllib.request.urlopen(url, data=text.encode(), timeout=30) as answer:
            answer.read()

    def bill(self) -> dict[str, Any]:
        """Once nothing is being generated any more, so that the bill is final."""
        wait_for(lambda: self.get("/gateway/bill")["open"] == 0, "open generations to end")
        bill: dict[str, Any] = self.get("/gateway/bill")
        return bill

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def run_config(gateway: Gateway, limit: int = 24, **sections: dict[str, Any]) -> Config:
    """Calls through the API and talk through the local server, all at the gateway."""
    raw: dict[str, Any] = {
        "run": {"min_free_disk_bytes": 1, "stages": ["generate", "reconstruct"], "seed": 3},
        "dataset": [
            {
                "name": "calls",
                "kind": "embedded",
                "limit": limit,
                "families": ["discount", "weather"],
            },
            {
                "name": "local",
                "kind": "embedded",
                "limit": max(1, limit // 3),
                "families": ["arithmetic", "lists"],
                "arm": "local",
                "backend": "sglang",
            },
        ],
        "generate": {
            "max_in_flight": 8,
            "temperature": 0.6,
            "max_tokens": 200,
            "canary": 0,
            "openrouter": {
                "base_url": gateway.address["base_url_openrouter"],
                "model": "eyas/embedded",
            },
            "sglang": {"urls": [gateway.address["base_url_sglang"]]},
        },
        "tripwires": {"enabled": False},
    }
    for name, values in sections.items():
        raw[name] = {**raw.get(name, {}), **values}
    return parse(raw, "test")


def new_run(config: Config, folder: Path, run_id: str) -> RunDir:
    return create_run(config, folder, run_id, ["test"])


class Engine:
    """`python -m core engine` as a direct child, so that it can be waited for."""

    def __init__(self, run: RunDir, *options: str) -> None:
        self.run = run
        self.orphans: list[psutil.Process] = []
        run.halt_file.unlink(missing_ok=True)
        with run.output_log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "core", "engine", "--run", str(run.path), *options],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        """SIGKILL. What it leaves behind is in `orphans`."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.orphans = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def wait(self, timeout_s: float = 120.0) -> int:
        return self.process.wait(timeout=timeout_s)

    def until_replies(self, count: int) -> None:
        """Until completions.jsonl holds so many lines, or the engine has ended."""
        wait_for(
            lambda: not self.alive or lines_in(self.run.completions) >= count, f"{count} replies"
        )


def lines_in(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


class Books(NamedTuple):
    """What a run says about itself, and what the gateway billed beyond it."""

    outcomes: Counter[str]
    spent_usd: float
    billed_usd: float
    uncertain_usd: float
    uncertain: int
    unseen: int
    """Generations that the gateway billed and no line of the run names."""
    unseen_usd: float


def check(run: RunDir, bill: dict[str, Any], earlier: frozenset[str] = frozenset()) -> Books:
    """Assert everything that must hold after any number of kills, once the run is done.

    `earlier`: generations that the gateway had billed before this run began. Exactly one outcome a
    prompt; one closing line a dispatch; no torn line; every generation that the run ever heard of
    booked at what the gateway billed. A request that was killed between leaving and its first
    header is known to the gateway alone: it must be booked as uncertain, at no less than it cost,
    until the account's total has proven what all of them cost together.
    """
    _check_lines(run)
    outcomes = _outcomes(run)
    known: dict[tuple[str, int], str] = {}
    closed: dict[tuple[str, int], SpendLine] = {}
    dispatched: set[tuple[str, int]] = set()
    adjusted = unproven = 0.0
    for line in read_jsonl(run.spend, SpendLine):
        key = (line.prompt_id, line.attempt)
        if line.kind == "dispatch":
            assert key not in dispatched, f"{key} was sent twice under one number"
            dispatched.add(key)
        elif line.kind == "adjusted":
            adjusted, unproven = adjusted + line.cost_usd, 0.0
        elif line.kind in CLOSING:
            assert key in dispatched and key not in closed, f"{key} was closed twice"
            closed[key] = line
            unproven += line.cost_usd if line.kind == "uncertain" else 0.0
        if line.generation_id:
            known[key] = line.generation_id
    assert dispatched == set(closed), "a dispatch was never closed"
    billed = {g["id"]: g["cost_usd"] or 0.0 for g in bill["generations"] if g["id"] not in earlier}
    certain, uncertain = 0.0, []
    for key, line in closed.items():
        generation = known.get(key, "")
        if line.kind == "uncertain":
            uncertain.append(line.cost_usd)
        else:
            certain += line.cost_usd
            if generation in billed:
                assert abs(billed[generation] - line.cost_usd) < 1e-9, (
                    key,
                    line,
                    billed[generation],
                )
    named = {g for key, g in known.items() if closed[key].kind != "uncertain"}
    unseen = {g: usd for g, usd in billed.items() if g not in named}
    assert len(unseen) <= len(uncertain), "a billed generation has no line in the books"
    assert sum(unseen.values()) <= sum(uncertain) + 1e-9, "uncertain spend is booked too low"
    billed_usd = sum(billed.values())
    assert abs(certain + sum(unseen.values()) - billed_usd) < 1e-9, "books and bill differ"
    spent_usd = certain + sum(uncertain) + adjusted
    if not unproven:
        assert abs(spent_usd - billed_usd) < 1e-9, f"booked {spent_usd!r}, billed {billed_usd!r}"
    return Books(
        outcomes=outcomes,
        spent_usd=spent_usd,
        billed_usd=billed_usd,
        uncertain_usd=unproven,
        uncertain=len(uncertain),
        unseen=len(unseen),
        unseen_usd=sum(unseen.values()),
    )


def _check_lines(run: RunDir) -> None:
    """No file of lines has a torn or unreadable one; the journal's numbers only rise."""
    last = 0
    for path in sorted(run.path.rglob("*.jsonl")):
        data = path.read_bytes()
        assert not data or data.endswith(b"\n"), f"{path} ends in a torn line"
        for text in data.splitlines():
            row = json.loads(text)
            assert isinstance(row, dict), path
            if path.parent == run.journal:
                assert row["seq"] > last, f"{path}: {row['seq']} after {last}"
                last = row["seq"]


def _outcomes(run: RunDir) -> Counter[str]:
    finals: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    for row in read_jsonl(run.completions, dict):
        if row.get("final", True) and row["outcome"] != "aborted":
            finals[row["prompt_id"]] += 1
            outcomes[row["outcome"]] += 1
    asked = [p.prompt_id for p in read_jsonl(run.prompts, Prompt)]
    assert len(asked) == len(set(asked))
    wrong = {p: finals[p] for p in asked if finals[p] != 1}
    assert not wrong, f"prompts without exactly one outcome: {wrong}"
    assert set(finals) == set(asked), "an outcome of a prompt that was never asked"
    return outcomes
