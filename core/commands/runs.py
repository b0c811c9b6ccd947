"""Commands that start or steer an engine: demo, run, resume, stage, drain, and halt's help."""

from pathlib import Path
from typing import Annotated

import typer

from core import config as cf
from core.commands.common import Detach, Plain, RunName, Sets, app, argv, follow
from core.errors import EXIT_DONE, ControlError
from core.halting import HaltError, HaltLink, engine_pid, lives_here, recorded_socket_path
from core.halting import main as halt_main
from core.pipeline import launch as lc
from core.pipeline.setting import DEMO_CONFIG
from core.pipeline.stages import BY_NAME
from core.store import find_run


@app.command()
def demo(detach: Detach = False, plain: Plain = False, set_: Sets = None) -> int:
    """The whole line on the embedded target, from prompts to a drafter."""
    config = cf.load(DEMO_CONFIG, set_)
    return follow(lc.prepare_new(config, Path.cwd(), argv()), detach, plain)


@app.command()
def run(
    config: Annotated[Path | None, typer.Argument(help="TOML; default: ./config.toml")] = None,
    detach: Detach = False,
    plain: Plain = False,
    set_: Sets = None,
    resume: Annotated[str, typer.Option(metavar="RUN", help="go on with this run")] = "",
) -> int:
    """Start a run in its own process, then open the console on it."""
    if resume:
        return follow(lc.prepare_resume(resume, argv(), config, set_), detach, plain)
    path = config or Path("config.toml")
    loaded = cf.load(path, set_)
    return follow(lc.prepare_new(loaded, path.resolve().parent, argv()), detach, plain)


@app.command()
def resume(run: RunName, detach: Detach = False, plain: Plain = False, set_: Sets = None) -> int:
    """Go on with a run that was halted or killed. Nothing that was finished is sent again."""
    return follow(lc.prepare_resume(run, argv(), None, set_), detach, plain)


@app.command()
def abandon(
    run: RunName,
    yes: Annotated[bool, typer.Option("--yes", help="do it; without, only say what")] = False,
    detach: Detach = False,
) -> int:
    """Give up what is pending: never asked, the books settled.

    `eyas resume` does the rest with what is there.
    """
    start = lc.prepare_abandon(run, argv(), yes)
    code = follow(start, detach, plain=True)
    if not code and not detach:
        typer.echo(f"{start.run.run_id}: eyas resume {start.run.path} goes on with what is there")
    return code


@app.command()
def stage(
    name: Annotated[str, typer.Argument(help=f"one of {', '.join(BY_NAME)}")],
    run: Annotated[str, typer.Option("--run", metavar="RUN")],
    detach: Detach = False,
) -> int:
    """One stage again, without its earlier output.

    What was paid for is never removed.
    """
    start = lc.prepare_stage(name, run, argv())
    return follow(start, detach, plain=True)


@app.command()
def halt(
    run: RunName,
    sever: Annotated[bool, typer.Option(help="cut off what is in flight as well")] = False,
    reason: str = "",
) -> int:
    """Stop a run at once: no new request, nothing that arrived is lost."""
    options = ["--sever"] * sever + (["--reason", reason] if reason else [])
    return halt_main([run, *options])  # `eyas halt` itself takes a shorter way and never comes here


@app.command()
def drain(
    run: RunName, reason: Annotated[str, typer.Option(help="kept in the journal")] = ""
) -> int:
    """Send nothing new and let what is in flight finish."""
    found = find_run(run)
    if lives_here(found.path) and not engine_pid(found.path):
        raise ControlError(f"{found.run_id}: no engine of this run is alive here; nothing to drain")
    try:
        link = HaltLink(recorded_socket_path(found.path), "eyas drain", role="operator")
        try:
            ack = link.command("drain", reason)
        finally:
            link.close()
    except HaltError as e:
        raise ControlError(f"{found.run_id}: {e}") from e
    if not ack.get("ok"):
        raise ControlError(f"{found.run_id}: {ack.get('error')}")
    typer.echo(f"{found.run_id}: {ack.get('state')}")
    return EXIT_DONE
