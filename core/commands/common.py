"""What all commands share: the typer application, options that mean the same everywhere, how output
leaves.

Knows no command.
"""

import json
import os
import subprocess
import sys
from typing import Annotated, Any

import msgspec
import typer

from core.errors import EXIT_DONE, EXIT_FAILED, printable
from core.halting import python_command
from core.pipeline import launch as lc
from core.store import RunDir, Status, observed_status

app = typer.Typer(
    name="eyas",
    help="Raises EAGLE-3 draft models on token-exact data, watched and halted from a terminal.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override one config value")
]
RunName = Annotated[str, typer.Argument(metavar="RUN", help="run id, its beginning, or a path")]
Detach = Annotated[bool, typer.Option("--detach", help="print the launch record and return")]
Plain = Annotated[bool, typer.Option("--plain", help="lines instead of the console")]
AsJson = Annotated[bool, typer.Option("--json", help="one JSON object, stable")]


def argv() -> list[str]:
    """The command line, as the manifest records it."""
    return ["eyas", *sys.argv[1:]]


def emit(value: Any) -> None:
    """One JSON line."""
    typer.echo(json.dumps(msgspec.to_builtins(value)))


def console(*arguments: str) -> int:
    """`python -m console ...` in this terminal; returns its exit code."""
    return subprocess.call(python_command("console", *arguments))


def has_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def _ending(run: RunDir, status: Status) -> str:
    """What stays on a terminal that the console of an ended run has left; of a run that goes on the
    console says it."""
    if status.state == "done":
        return f"{run.run_id}: done; eyas report {run.path} says what it made"
    said, reason = status.state, status.reason
    if reason:
        said = reason if reason.startswith(said) else f"{said}: {reason}"  # "halted (...)"
    return f"{run.run_id}: {said}; eyas resume {run.path} goes on"


def follow(start: lc.Start, detach: bool, plain: bool) -> int:
    """Launch, then show. The exit code is the run's own when it ended meanwhile, 0 when it goes
    on."""
    record = lc.launch(start)
    if detach:
        emit(record)
        return EXIT_DONE
    arguments = [str(start.run.path)]
    if plain or not has_terminal():
        typer.echo(
            f"{record['run_id']}: pid {record['pid']}; to stop it: eyas halt {start.run.path}"
        )
        arguments.append("--plain")
    shown = console(*arguments)
    status = observed_status(start.run)
    if "--plain" not in arguments and (status.exit_code is not None or status.state == "crashed"):
        typer.echo(printable(_ending(start.run, status)))
    if status.exit_code is not None:
        return status.exit_code
    return EXIT_FAILED if status.state == "crashed" else shown
