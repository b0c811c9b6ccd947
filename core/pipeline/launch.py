"""Start an engine and know that it is up: in its own session, deaf to this terminal, with its
output in a file.

Runs in the process of the command line. A start that fails leaves one line of why, and no run
directory that was made for it."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from core.config import Config, dump, load
from core.errors import EXIT_FAILED, EyasError, StoreError, UsageError, boundary
from core.halting import engine_pid, python_command
from core.pipeline.setting import read_prompts, resolve
from core.pipeline.stages import BY_NAME, stage_named
from core.render.source import pinned
from core.store import RunDir, create_run, find_run, write_atomic


class LaunchError(EyasError):
    """The engine said why it did not start; `exit_code` is its own."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Start(NamedTuple):
    """What the engine is told. `new`: the directory was made for this start."""

    run: RunDir
    argv: list[str]
    new: bool = False
    only: str = ""
    fresh_prompts: bool = False
    abandon: bool = False
    stored_config: bytes = b""
    """config.toml as it was before overrides: comes back when the engine refuses them."""


def prepare_new(config: Config, base: Path, argv: list[str]) -> Start:
    """A run directory for a config whose relative paths mean `base`. Raises UsageError or
    StoreError."""
    return Start(create_run(pinned(resolve(config, base)), base, argv=argv), argv, new=True)


def prepare_resume(
    name: str, argv: list[str], config_path: Path | None = None, overrides: list[str] | None = None
) -> Start:
    """Go on with a run, by ids. A new config or overrides replace the stored ones, and the datasets
    are read again: an edited prompt is a new prompt, an unchanged one stays done. Takes the HALT
    file away."""
    run = find_run(name)
    if pid := engine_pid(run.path):
        raise UsageError(
            f"{run.run_id}: its engine is alive (pid {pid}); `eyas attach {run.run_id}` opens it"
        )
    changed = config_path is not None or bool(overrides)
    before = b""
    if changed:
        source = config_path or run.config_toml
        config = pinned(resolve(load(source, overrides), source.resolve().parent))
        stored = run.load_config()
        config = msgspec.structs.replace(
            config,
            run=msgspec.structs.replace(config.run, dir=stored.run.dir, name=stored.run.name),
        )
        with boundary(StoreError, str(run.config_toml)):
            before = run.config_toml.read_bytes()
            write_atomic(run.config_toml, dump(config).encode())
    run.halt_file.unlink(missing_ok=True)
    return Start(run, argv, fresh_prompts=changed, stored_config=before)


def prepare_stage(stage: str, name: str, argv: list[str]) -> Start:
    """One stage of a run again. Raises UsageError for an unknown stage or run, and where a stage
    that it reads has left nothing."""
    chosen, run = stage_named(stage), find_run(name)
    for need in chosen.needs:
        if not any(any(run.path.glob(pattern)) for pattern in BY_NAME[need].files):
            raise UsageError(
                f"{run.run_id}: nothing for {stage} to read, {need} has left nothing yet; "
                f"eyas resume {run.path} carries out what is missing"
            )
    return prepare_resume(name, argv)._replace(only=chosen.name)


def prepare_abandon(name: str, argv: list[str], sure: bool) -> Start:
    """Give up what is pending in a run that does not run. Raises UsageError that says what it would
    do, unless `sure`."""
    from core.generate import recover  # aiohttp: only who gives up waits for it

    run = find_run(name)
    if not sure and not engine_pid(run.path):
        found = recover(run)
        prompts = {p.prompt_id for p in read_prompts(run)}
        if not found.open and prompts <= found.finished:
            raise UsageError(
                f"{run.run_id}: nothing is pending and no request is open; there is nothing to "
                "give up"
            )
        raise UsageError(
            f"{run.run_id}: {len(prompts - found.finished)} of {len(prompts)} prompts would never "
            f"be asked, {len(found.open)} open requests be settled; add --yes to give them up"
        )
    return prepare_resume(name, argv)._replace(only="generate", abandon=True)


def launch(start: Start) -> dict[str, Any]:
    """Start the engine; return its launch record once its control socket is bound. Raises
    LaunchError."""
    run = start.run
    reading, writing = os.pipe()
    command = python_command("core", "engine", "--run", str(run.path), "--fork")
    command += ["--ready-fd", str(writing), "--argv", json.dumps(start.argv)]
    if start.only:
        command += ["--only", start.only]
    command += ["--fresh-prompts"] * start.fresh_prompts + ["--abandon"] * start.abandon
    try:
        with run.output_log.open("ab") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=(writing,),
            )
    except OSError as e:
        os.close(reading)
        raise StoreError(f"{run.output_log}: engine cannot be started ({e.strerror})") from e
    finally:
        os.close(writing)
    process.wait()
    with os.fdopen(reading, "rb") as pipe:
        line = pipe.readline()
    record: dict[str, Any] = (
        json.loads(line) if line else {"error": _last_words(run), "exit_code": EXIT_FAILED}
    )
    if "error" not in record:
        return record
    if start.new:
        shutil.rmtree(run.path, ignore_errors=True)
    elif start.stored_config:
        with boundary(StoreError, str(run.config_toml)):
            write_atomic(run.config_toml, start.stored_config)
    raise LaunchError(str(record["error"]), record["exit_code"])


def _last_words(run: RunDir) -> str:
    """For an engine that died before it could say anything."""
    lines = run.output_log.read_text(encoding="utf-8", errors="replace").split("\n")
    spoken = [line.strip() for line in lines if line.strip()]
    return f"the engine did not start: {spoken[-1] if spoken else 'no output'}"
