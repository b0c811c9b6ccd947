"""What each command of `eyas` starts. Dispatch only: arguments in, one call, an exit code out.

What is drawn for people is drawn by `python -m console`; here are JSON, plain lines and the start
of processes."""

import os
import traceback
from importlib.metadata import version as installed_version
from typing import Annotated

import typer

from core.commands import looks, probing, runs, tools
from core.commands.common import app, console
from core.errors import EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EyasError, printable

__all__ = ["app", "looks", "main", "probing", "runs", "tools"]


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="print the version")] = False,
) -> int:
    """Without a command: the console with the list of runs. --debug shows tracebacks."""
    if version:
        typer.echo(installed_version("eyas"))
        return EXIT_DONE
    if context.invoked_subcommand is None:
        return console()
    return EXIT_DONE


def main(arguments: list[str]) -> int:
    """Run one command; returns its exit code. One line for every error that a person can mend."""
    debug = "--debug" in arguments
    try:
        known = [a for a in arguments if a != "--debug"]
        code = app(known, prog_name="eyas", standalone_mode=False)
    except typer.exceptions.TyperException as e:
        said = getattr(e, "format_message", e.__str__)().rstrip(".")
        context = getattr(e, "ctx", None)
        path = context.command_path if context else "eyas"
        return _say(f"{said}; see {path} --help", EXIT_USAGE)
    except EyasError as e:
        if debug:
            traceback.print_exc()
        return _say(str(e), e.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return _say("interrupted; a run that was started goes on (eyas list, eyas halt RUN)", 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the reader has had enough
        return EXIT_DONE
    except Exception as e:
        if debug:
            raise
        return _say(f"internal error: {type(e).__name__}: {e}; --debug shows where", EXIT_FAILED)
    return code if isinstance(code, int) else EXIT_DONE


def _say(message: str, code: int) -> int:
    typer.echo(f"eyas: {printable(' '.join(message.split()))}", err=True)
    return code
