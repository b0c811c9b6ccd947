"""Commands that only look: attach, watch, list, status, audit, report, eval."""

import json
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from core.commands.common import (
    AsJson,
    Plain,
    RunName,
    app,
    argv,
    console,
    emit,
    follow,
    has_terminal,
)
from core.errors import EXIT_DONE, StoreError, UsageError
from core.pipeline import launch as lc
from core.store import RunDir, find_run, list_runs, observed_status, read_eval, write_atomic


@app.command()
def attach(
    run: RunName,
    read_only: Annotated[bool, typer.Option("--read-only", help="no key reaches the run")] = False,
) -> int:
    """Open the console on a run, live or finished."""
    return console(str(find_run(run).path), *["--read-only"] * read_only)


@app.command()
def watch(run: RunName, plain: Plain = False) -> int:
    """Follow a run without being able to touch it."""
    found = str(find_run(run).path)
    if plain or not has_terminal():
        return console("watch", found)
    return console(found, "--read-only")


@app.command("list")
def list_(as_json: AsJson = False) -> int:
    """All runs in ./runs (or $EYAS_RUNS), newest first."""
    if not as_json:
        return console("list")
    for found in list_runs():
        emit(_with_path(found))
    return EXIT_DONE


@app.command()
def status(run: RunName, as_json: AsJson = False) -> int:
    """The headline numbers of one run."""
    found = find_run(run)
    if not as_json:
        return console("status", str(found.path))
    emit(_with_path(found))
    return EXIT_DONE


def _with_path(run: RunDir) -> dict[str, object]:
    status = observed_status(run)
    return {**msgspec.structs.asdict(status), "path": str(run.path.resolve())}


@app.command()
def audit(
    run: RunName,
    apply: Annotated[str, typer.Option(help="keep, mask, filter or regenerate")] = "",
    dataset: Annotated[list[str] | None, typer.Option(help="only these datasets")] = None,
    as_json: AsJson = False,
) -> int:
    """What the audit found; with --apply, act on it."""
    found = find_run(run)
    if apply:
        from core.audit.apply import apply as carry_out  # scipy: only who acts waits for it

        emit(carry_out(found, apply, dataset or []))
        return EXIT_DONE
    if as_json:
        emit(_stored_json(found.audit, f"eyas stage audit --run {found.path}"))
        return EXIT_DONE
    return console("audit", str(found.path))


@app.command()
def report(
    run: RunName,
    as_json: AsJson = False,
    html: Annotated[Path | None, typer.Option(help="write a page with plots")] = None,
) -> int:
    """What was made, spent and rejected, and what the drafter gains."""
    found = find_run(run)
    if html is not None:
        return _write_page(found, html)
    if not as_json:
        return console("report", str(found.path))
    from core.audit import account  # scipy: only who reports waits for it

    emit(account.report(found))
    return EXIT_DONE


def _write_page(run: RunDir, html: Path) -> int:
    if not html.name:
        raise UsageError(f"--html {html}: not a file's name; name a file")
    from core.audit import account  # scipy: only who reports waits for it
    from core.audit.page import render

    page = render(account.report(run))
    try:
        write_atomic(html, page.encode("utf-8", errors="backslashreplace"))
    except OSError as e:
        raise UsageError(f"--html {html}: cannot be written ({e.strerror}); name a file") from e
    typer.echo(f"{html}: written")
    return EXIT_DONE


@app.command("eval")
def eval_(run: RunName, as_json: AsJson = False) -> int:
    """Acceptance of a run's drafter, measured where it has not been."""
    found = find_run(run)
    if read_eval(found) is None:
        code = follow(lc.prepare_stage("evaluate", run, argv()), detach=False, plain=True)
        if code:
            return code
    measured = read_eval(found)
    if measured is None:
        raise StoreError(f"{found.eval}: cannot be read; eyas stage evaluate --run {found.path}")
    if as_json:
        emit(measured)
        return EXIT_DONE
    typer.echo(f"{'dataset':<24} {'length':>6}  tokens / forwards of the target")
    rows = {"all": measured.walk, **measured.by_dataset}
    for name, counts in rows.items():
        typer.echo(f"{name:<24} {counts.acceptance_length:6.3f}  {counts.tokens} / {counts.steps}")
    return EXIT_DONE


def _stored_json(path: Path, remedy: str) -> object:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as e:
        raise StoreError(f"{path}: not there yet; {remedy}") from e
