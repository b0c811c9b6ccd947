"""A run with hundreds of requests in flight against a replay gateway, started as a user starts it,
and what must hold after it was halted: nothing late, nothing lost, the books equal to the bill.

The gateway is a process of its own and outlives every engine, so its list of arrivals and its bill
are the truth that the run is held to. Needs no weights: replies are the corpus's own answers."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from core import events as ev
from core.config import dump, parse
from core.embedded import TARGET_DIR
from core.embedded.corpus import Example, examples
from core.embedded.grammar import completion_ids, prompt_ids
from core.halting import engine_pid
from core.journal import read_journal
from core.render.base import load_renderer
from core.schema import Rollout, SpendLine, reply_text
from core.store import RunDir, read_jsonl, read_status
from tests.faults.rig import CLOSING, ROOT, Gateway, check, wait_for

KEY_ENV = "EYAS_HALT_TEST_KEY"
STEADY_S = 2.0
BUCKET_S = 0.5
RACE_S = 0.25
LOCAL_SHARE = 6
"""Every sixth prompt goes to the local server: its requests are cut and aborted on a halt."""


class Load(NamedTuple):
    """`tokens_per_s` makes a reply of the corpus's median 31 tokens last a few seconds."""

    in_flight: int
    tokens_per_s: float
    prompts: int


class Arrivals(NamedTuple):
    """What the gateway saw around a moment, in seconds after it. `last_s` is negative when the last
    request came before it."""

    in_flight: int
    per_s: float
    """Over the two seconds before the moment."""
    thinnest: int
    """Arrivals in the emptiest half second of those."""
    last_s: float
    late: int
    """Arrivals more than 0.1 s after it."""


def write_load(folder: Path, load: Load) -> None:
    """Two prompt files and the tape of their replies."""
    renderer = load_renderer(TARGET_DIR, "kimi-k2.5")
    with (
        (folder / "calls.jsonl").open("w", encoding="utf-8") as calls,
        (folder / "local.jsonl").open("w", encoding="utf-8") as local,
        (folder / "tape.jsonl").open("w", encoding="utf-8") as tape,
    ):
        for n, example in enumerate(examples("train", 11, (), load.prompts)):
            rows = local if n % LOCAL_SHARE == 0 else calls
            rows.write(json.dumps(_row(example)) + "\n")
            record = {
                "prompt_ids": prompt_ids(example, renderer),
                "completion_ids": completion_ids(example, renderer.tokenizer),
            }
            tape.write(json.dumps(record) + "\n")


def _row(example: Example) -> dict[str, Any]:
    row: dict[str, Any] = {"messages": example.messages, "thinking": example.thinking}
    return row | ({"tools": example.tools} if example.tools else {})


def start_gateway(folder: Path, load: Load) -> Gateway:
    return Gateway(
        folder,
        "--replay",
        str(folder / "tape.jsonl"),
        "--tokens-per-s",
        str(load.tokens_per_s),
        "--latency-scale",
        "0",
        "--truth",
        str(folder / "truth.jsonl"),
    )


def write_config(folder: Path, gateway: Gateway, load: Load) -> Path:
    """Three providers: closing a stream stops the bill at two of them, the third's replies are paid
    for anyway."""
    raw = {
        "run": {
            "dir": str(folder / "runs"),
            "stages": ["generate"],
            "min_free_disk_bytes": 1,
            "budget_usd": 100.0,
        },
        "dataset": [
            {"name": "calls", "path": str(folder / "calls.jsonl")},
            {
                "name": "local",
                "path": str(folder / "local.jsonl"),
                "arm": "local",
                "backend": "sglang",
            },
        ],
        "generate": {
            "max_in_flight": load.in_flight,
            "max_tokens": 128,
            "canary": 0,
            "openrouter": {
                "base_url": gateway.address["base_url_openrouter"],
                "api_key_env": KEY_ENV,
                "model": "eyas/embedded",
                "cancellable": ["alder", "birch"],
            },
            "sglang": {"urls": [gateway.address["base_url_sglang"]]},
        },
        "tripwires": {"enabled": False},
    }
    path = folder / "halt.toml"
    path.write_text(dump(parse(raw, "halt load")), encoding="utf-8")
    return path


class LoadedRun:
    """One run under load, its gateway, and the readings of both. Close it."""

    def __init__(self, folder: Path, load: Load) -> None:
        self.folder, self.load = folder, load
        self.env = {KEY_ENV: "any", "EYAS_RUNS": str(folder / "runs"), "OMP_NUM_THREADS": "1"}
        write_load(folder, load)
        self.gateway = start_gateway(folder, load)
        record = self.eyas("run", str(write_config(folder, self.gateway, load)), "--detach")
        self.run = RunDir(Path(json.loads(record)["path"]))
        self._first = self._booked = 0
        self._finished: set[str] = set()

    def eyas(self, *arguments: str) -> str:
        """A command that must succeed; returns what it printed."""
        done = subprocess.run(
            [sys.executable, "-P", "-m", "core", *arguments],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=os.environ | self.env,
            timeout=120,
        )
        assert done.returncode == 0, f"eyas {' '.join(arguments)}: {done.stderr}"
        return done.stdout

    def close(self) -> None:
        if pid := engine_pid(self.run.path):
            os.kill(pid, 9)
        self.gateway.close()

    # ── under load ───────────────────────────────────────────────────────────────────────────

    def arrivals(self) -> list[dict[str, Any]]:
        """Requests of this life of the engine, in order of arrival."""
        rows: list[dict[str, Any]] = self.gateway.get("/gateway/requests")["requests"]
        return rows[self._first :]

    def until_steady(self) -> None:
        """Until the window is full and requests have kept arriving: in every half second of the
        last two seconds, a sixtieth of what is in flight or more."""

        def steady() -> bool:
            assert engine_pid(self.run.path), "the run ended before it was under load"
            rows = self.arrivals()
            open_now = sum(r.get("ended") is None for r in rows)
            if open_now < 0.9 * self.load.in_flight:
                return False
            return _seen(rows, rows[-1]["t"]).thinnest >= self.load.in_flight / 60

        wait_for(steady, f"{self.load.in_flight} in flight and steady arrivals")

    def arrivals_at(self, moment: float) -> Arrivals:
        return _seen(self.arrivals(), moment)

    def until_stopped(self) -> None:
        wait_for(lambda: not engine_pid(self.run.path), "the engine's end")

    def forget(self) -> None:
        """Before a resume: what follows belongs to another life of the engine."""
        self._first += len(self.arrivals())
        self._booked = len(self.spend())
        self._finished = {r.prompt_id for r in self.replies() if _final(r)}

    # ── afterwards ───────────────────────────────────────────────────────────────────────────

    def replies(self) -> list[Rollout]:
        return list(read_jsonl(self.run.completions, Rollout))

    def spend(self) -> list[SpendLine]:
        return list(read_jsonl(self.run.spend, SpendLine))

    def halts(self) -> list[ev.Halt]:
        """Of the newest life: the gate's closing first, the account last."""
        found: list[ev.Halt] = []
        for event in read_journal(self.run):
            if isinstance(event, ev.RunStarted):
                found.clear()
            elif isinstance(event, ev.Halt):
                found.append(event)
        return found

    def check_stopped(self, state: str = "halted", code: int = 3) -> ev.Halt:
        """State, exit code, books and replies of a stopped engine; returns the halt's account."""
        status = read_status(self.run)
        assert status is not None and (status.state, status.exit_code) == (state, code), status
        words = json.loads(self.run.output_log.read_text().strip().split("\n")[-1])
        assert (words["event"], words["exit_code"]) == ("done", code), words
        bill = self.gateway.bill()
        account = self.halts()[-1]
        assert account.complete, account
        self._check_replies(bill)
        self._check_books(bill, account)
        return account

    def _check_replies(self, bill: dict[str, Any]) -> None:
        """Whole replies that left the gateway are on disk, and no prompt ended twice. A local reply
        that ends while the gate closes may meet a connection that is cut already."""
        kept = {r.generation_id for r in self.replies() if r.generation_id and reply_text(r)}
        whole = [g["id"] for g in bill["generations"] if not g["cancelled"]]
        gate = self.halts()[0].ts
        whole += [
            r["generation_id"]
            for r in self.arrivals()
            if r.get("status") == 200 and not r.get("left") and r["ended"] < gate - RACE_S
        ]
        lost = [one for one in whole if one not in kept]
        assert not lost, f"{len(lost)} whole replies are not in completions.jsonl: {lost[:3]}"
        finals = Counter(r.prompt_id for r in self.replies() if _final(r))
        assert not finals or max(finals.values()) == 1, "a prompt ended twice"

    def _check_books(self, bill: dict[str, Any], account: ev.Halt) -> None:
        booked, uncertain, open_ = 0.0, 0.0, set()
        for line in self.spend():
            key = (line.prompt_id, line.attempt)
            if line.kind == "dispatch":
                open_.add(key)
            elif line.kind == "adjusted":
                booked, uncertain = booked + line.cost_usd, 0.0
            elif line.kind in CLOSING:
                open_.remove(key)
                booked += line.cost_usd
                uncertain += line.cost_usd if line.kind == "uncertain" else 0.0
        assert not open_, f"{len(open_)} dispatches are not closed"
        assert abs(account.spent_usd - booked) < 1e-9, (account, booked)
        billed = bill["total_usd"]
        assert -1e-9 <= booked - billed <= uncertain + 1e-9, (booked, billed, uncertain)

    def asked_again(self) -> set[str]:
        """Prompts that had a final outcome before the last resume and were sent after it."""
        sent = {x.prompt_id for x in self.spend()[self._booked :] if x.kind == "dispatch"}
        return sent & self._finished

    def check_done(self) -> None:
        """The generate stage is through: every prompt in exactly one outcome, the books as
        billed."""
        status = read_status(self.run)
        assert status is not None and (status.state, status.exit_code) == ("done", 0), status
        books = check(self.run, self.gateway.bill())
        assert sum(books.outcomes.values()) == self.load.prompts, books
        assert not self.asked_again()


def _final(reply: Rollout) -> bool:
    return reply.final and reply.outcome != "aborted"


def _seen(rows: list[dict[str, Any]], moment: float) -> Arrivals:
    since = [r["t"] - moment for r in rows]
    buckets = Counter(int(-s / BUCKET_S) for s in since if -STEADY_S < s <= 0)
    before = sum(buckets.values())
    open_then = sum(
        r["t"] <= moment and (r.get("ended") is None or r["ended"] > moment) for r in rows
    )
    return Arrivals(
        in_flight=open_then,
        per_s=before / STEADY_S,
        thinnest=min(buckets[n] for n in range(int(STEADY_S / BUCKET_S))),
        last_s=max(since, default=float("-inf")),
        late=sum(s > 0.1 for s in since),
    )
