"""The engine as an operating-system process: one a run directory, deaf to hang-ups, with a last
line in its log.

Knows file descriptors, locks and exit codes, nothing of stages.
"""

import argparse
import asyncio
import contextlib
import fcntl
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from core.config import Config
from core.errors import EXIT_FAILED, EyasError, StoreError
from core.pipeline.engine import Engine, Options
from core.store import RunDir
from core.store.rundir import check_space

SPARE_FILES = 256
"""Descriptors beside those of requests: files, sockets of consoles, children."""


def main(argv: list[str]) -> int:
    """`python -m core engine --run DIR [--only STAGE] [--fresh-prompts] [--ready-fd N]
    [--fork]`."""
    parser = argparse.ArgumentParser(prog="python -m core engine")
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--fresh-prompts", action="store_true")
    parser.add_argument("--ready-fd", type=int, default=-1)
    parser.add_argument("--argv", default="[]", help="the command line that the manifest records")
    parser.add_argument("--fork", action="store_true")
    asked = parser.parse_args(argv)
    if asked.fork and os.fork():
        return 0  # the launcher reaps this half at once; the other half is nobody's zombie
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    run = RunDir(asked.run)

    def tell(record: dict[str, Any]) -> None:
        pipe, asked.ready_fd = asked.ready_fd, -1  # once closed, its number is another file's
        if pipe >= 0:
            with contextlib.suppress(OSError):  # the launcher did not wait
                os.write(pipe, json.dumps(record).encode() + b"\n")
            os.close(pipe)

    code, error = EXIT_FAILED, ""
    try:
        with only_engine(run):
            config = run.load_config()
            check_space(run.path, config.run.min_free_disk_bytes)
            raise_file_limit(config.generate.max_in_flight + SPARE_FILES)
            said = json.loads(asked.argv) or list(sys.argv)
            options = Options(said, asked.only, asked.fresh_prompts, tell)
            code = asyncio.run(_live(run, config, options))
    except EyasError as e:
        code, error = e.exit_code, str(e)
        tell({"error": error, "exit_code": code})
        sys.stderr.write(f"eyas: {error}\n")
    except Exception as e:
        traceback.print_exc()
        error = f"internal error: {type(e).__name__}: {e}; see {run.output_log}"
        tell({"error": error, "exit_code": code})
    sys.stderr.flush()
    record = {"event": "done", "run_id": run.run_id, "exit_code": code, "ts": time.time()}
    sys.stdout.write(json.dumps({**record, "error": error} if error else record) + "\n")
    sys.stdout.flush()
    return code


async def _live(run: RunDir, config: Config, options: Options) -> int:
    return await Engine(run, config, options).main()


@contextlib.contextmanager
def only_engine(run: RunDir) -> Iterator[None]:
    """Hold the run directory's lock; the kernel gives it back when the process ends, however it
    ends. Raises StoreError when another engine has it."""
    try:
        lock = (run.path / ".lock").open("wb")
    except OSError as e:
        raise StoreError(f"{run.path}: cannot be written ({e.strerror}); check the folder") from e
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise StoreError(
                f"{run.path}: an engine of this run is alive; `eyas attach {run.run_id}` opens it"
            ) from e
        yield


def raise_file_limit(wanted: int) -> None:
    """One descriptor a request. Raises StoreError when the hard limit does not allow it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        if hard != resource.RLIM_INFINITY and hard < wanted:
            raise StoreError(
                f"generate.max_in_flight needs {wanted} open files, the limit is {hard}; "
                "lower it, or raise the limit (ulimit -Hn)"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
