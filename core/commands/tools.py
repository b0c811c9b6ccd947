"""Commands beside a run: export, lint, doctor, tokens."""

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from core import config as cf
from core.commands.common import AsJson, RunName, Sets, app, emit
from core.errors import EXIT_DONE, EXIT_FAILED, ExportError, UsageError, printable
from core.pipeline.doctor import examine
from core.pipeline.setting import DEMO_CONFIG
from core.render.source import tokenizer_dir
from core.store import find_run

ENGINES = ("sglang", "vllm", "hf")


@app.command()
def export(
    run: RunName,
    to: Annotated[str, typer.Option(metavar="|".join(ENGINES), help="layout to write")],
) -> int:
    """The newest checkpoint as an engine reads it, linted, loaded back."""
    if to not in ENGINES:
        raise UsageError(f"--to {to}: not known; use {', '.join(ENGINES)}")
    from core.drafter import checkpoint  # torch: only who exports waits for it
    from core.drafter.export import export_checkpoint

    found = find_run(run)
    newest = checkpoint.latest(found.checkpoints)
    if newest is None:
        raise ExportError(f"{found.run_id}: no checkpoint; eyas stage train --run {found.path}")
    found.export.mkdir(exist_ok=True)
    folder = (found.export / to).resolve()  # it is printed in a launch line, for any folder
    emit(export_checkpoint(newest, found.load_config(), to, folder))
    return EXIT_DONE


@app.command()
def lint(
    directory: Path,
    engine: Annotated[
        str,
        typer.Option(metavar="|".join(ENGINES), help="who loads it; default: the folder's name"),
    ] = "",
    target: Annotated[Path | None, typer.Option(help="the target's folder, for shapes")] = None,
) -> int:
    """Check an exported drafter for what an engine would misread."""
    named = directory.resolve().name
    engine = engine or (named if named in ENGINES else "")
    if not engine:
        raise UsageError(f"{directory}: for which engine? add --engine {'|'.join(ENGINES)}")
    if engine not in ENGINES:
        raise UsageError(f"--engine {engine}: not known; use {', '.join(ENGINES)}")
    from core.drafter.lint import lint as find_problems  # torch: only who lints waits for it

    problems = find_problems(directory, engine, target)
    for problem in problems:
        typer.echo(printable(problem))
    if not problems:
        typer.echo(f"{directory}: nothing that {engine} would misread")
    return EXIT_FAILED if problems else EXIT_DONE


@app.command()
def doctor(
    config: Annotated[Path | None, typer.Argument(help="TOML; default: the demo's")] = None,
    download: Annotated[
        bool, typer.Option("--download", help="fetch a hub's tokenizer files")
    ] = False,
    set_: Sets = None,
    as_json: AsJson = False,
) -> int:
    """Can this config run here: tokenizer, keys, prices, limits, disk.

    Nothing that is billed is sent. A cost forecast is made.
    """
    path = config or DEMO_CONFIG
    base = config.resolve().parent if config else Path.cwd()  # where `eyas demo` makes its runs
    sets = [*(set_ or []), *["target.download=true"] * download]
    findings = examine(cf.load(path, sets), base)
    for finding in findings:
        if as_json:
            emit(finding)
        else:
            typer.echo(printable(f"{finding.level:<4}  {finding.what:<22}  {finding.detail}"))
    return EXIT_FAILED if any(f.level == "fail" for f in findings) else EXIT_DONE


@app.command()
def tokens(
    mode: Annotated[str, typer.Argument(metavar="encode|render|rebuild")],
    file: Annotated[Path | None, typer.Argument(help="JSONL; default: stdin")] = None,
    tokenizer: Annotated[
        str,
        typer.Option(metavar="DIR|OWNER/NAME", help="directory or hub name; default: embedded"),
    ] = "",
    variant: Annotated[str, typer.Option(help="chat template; default: kimi-k2.5's")] = "",
    download: Annotated[
        bool, typer.Option("--download", help="fetch a hub's tokenizer files")
    ] = False,
) -> int:
    """Token ids of text, prompts or replies, JSONL to JSONL in order."""
    from core import tokens as contract  # tiktoken: only who counts waits for it

    known = next((m for m in contract.MODES if m == mode), None)
    if known is None:
        raise UsageError(f"tokens {mode}: not known; use {', '.join(contract.MODES)}")
    directory = tokenizer_dir(tokenizer, variant, download)
    try:
        lines = file.open("rb") if file else contextlib.nullcontext(sys.stdin.buffer)
    except OSError as e:
        raise UsageError(f"{file}: cannot be read ({e.strerror}); name a JSONL file") from e
    with lines as lines_in:
        contract.run(known, directory, lines_in, sys.stdout.write, variant)
    return EXIT_DONE
