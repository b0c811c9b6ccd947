"""`eyas probe live`: one question asked in several ways, as a run of its own.

Finds a question when none is given, makes the run, waits for its end. Knows which backend an arm
uses; asking, judging and booking are the run's."""

import math
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

import msgspec

from core.config import Backend, Config, Dataset, load
from core.errors import UsageError
from core.events import ENDED
from core.halting import HaltError, engine_pid, halt_now
from core.pipeline.launch import LaunchError, Start, launch, prepare_new
from core.pipeline.setting import DEMO_CONFIG, resolve
from core.prompts import load_prompts
from core.render.source import renderer_of
from core.schema import Arm, Prompt, SpendLine
from core.store import (
    RunDir,
    Status,
    encode_line,
    find_run,
    holding,
    list_runs,
    new_run_id,
    observed_status,
    read_jsonl,
    write_atomic,
)

PREFIX = "probe-"
FREE_DISK_BYTES = 64 << 20
"""A few replies; the config's own limit is that of a whole run."""
STOPPED = (*ENDED, "crashed")
POLL_S = 0.05
GRACE_S = 30.0
"""Above the requests' own timeouts: start, look-ups of bills, rebuilding."""


class Ask(NamedTuple):
    """What `probe live` was told. `source`: the run to take a question from; `prompt`: a file with
    one. Neither: the newest run that has one."""

    arms: list[str]
    prompt: Path | None = None
    source: str = ""
    config: Path | None = None
    overrides: list[str] | None = None
    prompts: int = 1
    budget_usd: float = 0.25
    timeout_s: float = 60.0
    one_by_one: bool = False


def prepare_live(ask: Ask, argv: list[str]) -> Start:
    """A new run of one request an arm and question. Raises UsageError for what cannot be asked."""
    known = get_args(Arm)
    if unknown := [a for a in ask.arms if a not in known]:
        raise UsageError(f"--arms {unknown[0]!r}: not known; use {', '.join(known)}")
    if not ask.arms:
        raise UsageError(f"--arms: none named; use {', '.join(known)}")
    if ask.prompts < 1 or ask.timeout_s <= 0 or ask.budget_usd < 0:
        raise UsageError("probe live: --prompts, --timeout-s and --budget-usd are above zero")
    rows: list[dict[str, Any]] = []
    if ask.prompt is not None:
        config = _config(ask, None)
        where = ask.prompt.resolve()
    else:
        source, rows = _questions(ask)
        config = _config(ask, source)
        where = Path()
    name = f"{PREFIX}{new_run_id(time.time())}"
    if rows:
        where = Path(config.run.dir) / name / "question.jsonl"
    live = live_config(config, where, ask, name)
    if not rows:
        _check_whole(live)
    start = prepare_new(live, Path.cwd(), argv)
    if rows:
        write_atomic(start.run.path / where.name, b"".join(encode_line(row) for row in rows))
    return start


def live_config(config: Config, prompt: Path, ask: Ask, name: str) -> Config:
    """The config with one dataset an arm, one try a request, no canary, and no stage after
    reconstruct. Pure."""
    replace = msgspec.structs.replace
    arms = list(dict.fromkeys(ask.arms))
    datasets = [
        Dataset(
            name=f"{PREFIX}{arm}",
            path=str(prompt),
            limit=ask.prompts,
            arm=arm,  # type: ignore[arg-type]
            backend=backend_of(config, arm),
        )
        for arm in arms
    ]
    run = replace(
        config.run,
        name=name,
        stages=["generate", "reconstruct"],
        budget_usd=ask.budget_usd,
        min_free_disk_bytes=min(config.run.min_free_disk_bytes, FREE_DISK_BYTES),
    )
    generate = replace(
        config.generate,
        canary=0,
        max_in_flight=1 if ask.one_by_one else len(arms) * ask.prompts,
        attempts_paid=1,
        attempts_unpaid=1,
        first_event_timeout_s=ask.timeout_s,
        idle_timeout_s=ask.timeout_s,
        total_timeout_s=ask.timeout_s,
        connect_timeout_s=min(ask.timeout_s, config.generate.connect_timeout_s),
        patience_s=ask.timeout_s,
        reserve="all",
    )
    return replace(config, run=run, dataset=datasets, generate=generate)


def backend_of(config: Config, arm: str) -> Backend:
    """The backend that the config's datasets use for this arm, else the usual one."""
    for dataset in config.dataset:
        if dataset.arm == arm:
            return dataset.backend
    return "sglang" if arm == "local" else "openrouter"


def carry_out(start: Start, stopped: "Stopped") -> Status:
    """Launch, and wait for the end. What `stopped` counts halts the run, then severs it; so does
    a run that is kept waiting longer than a request may take. Raises the one line of a run that
    sent nothing, and leaves nothing of it."""
    launch(start)
    config = start.run.load_config()
    deadline = Deadline(start.run, config, time.monotonic())
    done = 0
    while (status := observed_status(start.run)).state not in STOPPED or engine_pid(start.run.path):
        waited_for = deadline.passed(status, time.monotonic())
        if waited_for:
            stopped.count += 1
        if stopped.count > done:
            _stop(start.run, sever=done > 0, reason=waited_for or "interrupted")
            done += 1
        time.sleep(POLL_S)
    if status.state in ("failed", "crashed") and not _sent(start.run):
        code = status.exit_code or 1
        shutil.rmtree(start.run.path, ignore_errors=True)
        reason = status.reason.replace("run.budget_usd", "--budget-usd")
        raise LaunchError(f"probe live: {reason}", code)
    return status


class Deadline:
    """When a probe has been waited for long enough: its requests have clocks of their own, a
    provider's wish to be asked later has none."""

    def __init__(self, run: RunDir, config: Config, now: float) -> None:
        generate = config.generate
        asked = len(config.dataset) * config.dataset[0].limit
        rounds = 1 if generate.max_in_flight >= asked else asked
        self._run = run
        self._timeout_s = generate.total_timeout_s
        self._until = now + rounds * self._timeout_s + GRACE_S
        self._idle_since: float | None = None

    def passed(self, status: Status, now: float) -> str:
        """Why to stop, each time that there is a new reason; else empty."""
        idle = self._is_idle(status)
        if not idle or self._idle_since is None:
            self._idle_since = now if idle else None
        elif now - self._idle_since > self._timeout_s:
            self._idle_since = math.inf
            return f"kept waiting for more than {self._timeout_s:g} s"
        if now > self._until:
            self._until = now + GRACE_S
            return "not done in the time that its requests may take"
        return ""

    def _is_idle(self, status: Status) -> bool:
        """Something was answered, nothing is in flight or to be billed, and not all is asked."""
        if status.stage != "generate" or status.in_flight or status.reserved_usd:
            return False
        try:
            answered = self._run.completions.stat().st_size > 0
        except OSError:
            return False
        return answered and status.done < status.prompts


def _sent(run: RunDir) -> bool:
    return any(line.kind == "dispatch" for line in read_jsonl(run.spend, SpendLine))


class Stopped:
    """How often the operator asked to stop. A signal handler counts, `carry_out` acts."""

    def __init__(self) -> None:
        self.count = 0


def _stop(run: RunDir, sever: bool, reason: str) -> None:
    try:
        halt_now(run.path, sever=sever, reason=f"probe live: {reason}", client="eyas probe")
    except HaltError:  # ended meanwhile, which is what was wanted
        return


def _config(ask: Ask, source: RunDir | None) -> Config:
    """Named, else that of the run the question comes from, else ./config.toml, else the demo's."""
    here = Path("config.toml")
    path = ask.config or (source.config_toml if source else here if here.is_file() else DEMO_CONFIG)
    base = Path.cwd() if path == DEMO_CONFIG else path.resolve().parent
    return resolve(load(path, ask.overrides), base)


def _check_whole(live: Config) -> None:
    """Every line of a prompt file is read, not only those that are asked: a fault further down
    means that the file is not what it was taken for. Raises PromptError with file:line."""
    whole = msgspec.structs.replace(live.dataset[0], limit=0)
    load_prompts(msgspec.structs.replace(live, dataset=[whole]))


# ---- questions


def _questions(ask: Ask) -> tuple[RunDir, list[dict[str, Any]]]:
    """Questions of a run whose local answer really called a tool, and that run."""
    runs = [find_run(ask.source)] if ask.source else list_runs()
    runs = [run for run in runs if ask.source or not run.run_id.startswith(PREFIX)]
    why = ""
    for run in runs:
        try:
            found = list(callers(run, ask.prompts))
        except UsageError as e:
            why = why or str(e)
            continue
        return run, [_row(prompt) for prompt in found]
    if ask.source:
        raise UsageError(f"{why}; name another run, or a file with --prompt")
    raise UsageError(
        f"probe live: no run has a local sample that called a tool "
        f"({why or 'no runs here'}); name a JSONL file with --prompt"
    )


def callers(run: RunDir, most: int) -> Iterator[Prompt]:
    """Prompts with tools whose local completion holds the id that begins a tool section: the ids
    are looked through, nothing is decoded. Raises UsageError when there is none."""
    if not next(iter(run.samples.glob("*.parquet")), None):
        raise UsageError(f"{run.run_id}: no samples yet")
    grammar = renderer_of(run.load_config()).grammar
    if grammar is None:
        raise UsageError(f"{run.run_id}: how its target writes a tool call is not known")
    wanted = holding(run, grammar.section_begin, arm="local")
    if wanted is None:
        raise UsageError(f"{run.run_id}: no local twins, nothing to compare with")
    left = set(wanted)
    count = 0
    for prompt in read_jsonl(run.prompts, Prompt):
        if prompt.prompt_id in left and prompt.tools:
            count += 1
            yield prompt
            if count == most:
                return
    if not count:
        raise UsageError(f"{run.run_id}: no local sample called a tool")


def _row(prompt: Prompt) -> dict[str, Any]:
    """A line of our own format that asks the same question again."""
    row = {"messages": prompt.messages, "tools": prompt.tools, "thinking": prompt.thinking}
    return {key: value for key, value in row.items() if value is not None}
