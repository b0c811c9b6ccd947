"""The engine as an operating-system process: one a run directory, deaf to hang-ups, with a last
line in its log.

Knows signals, the lock and exit codes, nothing of stages.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from core.config import Config
from core.errors import EXIT_FAILED, EyasError
from core.pipeline.engine import Engine, Options
from core.store import RunDir, only_one
from core.store.linefile import full_disk_named
from core.store.rundir import check_space


def main(argv: list[str]) -> int:
    """`python -m core engine --run DIR [--only STAGE [--abandon]] [--fresh-prompts] [--ready-fd N]
    [--fork]`."""
    parser = argparse.ArgumentParser(prog="python -m core engine")
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--abandon", action="store_true", help="give up what is pending")
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
        with only_one(run), full_disk_named():
            config = run.load_config()
            check_space(run.path, config.run.min_free_disk_bytes)
            said = json.loads(asked.argv) or list(sys.argv)
            options = Options(said, asked.only, asked.fresh_prompts, tell, asked.abandon)
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
