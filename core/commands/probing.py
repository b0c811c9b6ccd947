"""`eyas probe`: one sample's tokens, or one question asked in several ways."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from core.commands.common import AsJson, Plain, Sets, app, argv, console, emit
from core.errors import EXIT_DONE, EXIT_FAILED, UsageError
from core.pipeline.live_probe import Ask, Stopped, carry_out, prepare_live
from core.store import encode_line, find_run, write_atomic

OF_A_SAMPLE = ("sample", "against", "plain")
"""Parameters of `probe RUN`; all others are those of `probe live`."""


@app.command()
def probe(
    context: typer.Context,
    run: Annotated[str, typer.Argument(metavar="RUN|live", help="a run; `live` asks anew")],
    sample: Annotated[
        str, typer.Argument(metavar="[SAMPLE]", help="id or its beginning; without: the list")
    ] = "",
    against: Annotated[
        str, typer.Option(metavar="SAMPLE", help="compare with this one, not the local twin")
    ] = "",
    plain: Plain = False,
    arms: Annotated[str, typer.Option(help="ways of asking")] = "local,declared,text",
    prompt: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSONL; its first line is asked")
    ] = None,
    source: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="RUN",
            help="ask what this run's local arm answered with a tool call; default: newest run",
        ),
    ] = "",
    prompts: Annotated[int, typer.Option(help="so many questions instead of one")] = 1,
    config: Annotated[
        Path | None,
        typer.Option(metavar="TOML", help="backends; default: the run's, ./config.toml, the demo"),
    ] = None,
    budget_usd: Annotated[float, typer.Option(help="refused when the worst case is above")] = 0.25,
    timeout_s: Annotated[float, typer.Option(help="of each request, from its departure")] = 60.0,
    one_by_one: Annotated[bool, typer.Option(help="one request at a time")] = False,
    set_: Sets = None,
    as_json: AsJson = False,
) -> int:
    """A sample's tokens; `probe live`: one prompt asked several ways.

    Everything from --arms on belongs to `probe live`, which is a run of its own: paid from its
    own budget, booked, stopped by ctrl-c, kept for `eyas probe RUN SAMPLE`."""
    live = run == "live"
    _refuse_misplaced(context, live)
    if not live:
        words = [str(find_run(run).path), *([sample] if sample else [])]
        words += ["--against", against] if against else []
        return console("probe", *words, *["--plain"] * plain)
    return _live(
        Ask(
            arms=[a.strip() for a in arms.split(",") if a.strip()],
            prompt=prompt,
            source=source,
            config=config,
            overrides=set_,
            prompts=prompts,
            budget_usd=budget_usd,
            timeout_s=timeout_s,
            one_by_one=one_by_one,
        ),
        as_json,
    )


def _refuse_misplaced(context: typer.Context, live: bool) -> None:
    """What was said and would not be heard. Raises UsageError."""
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if name == "run" or (name in OF_A_SAMPLE) != live:
            continue
        if source is not None and source.name == "COMMANDLINE":
            said = "SAMPLE" if name == "sample" else parameter.opts[0]
            where = "a run: eyas probe RUN" if live else "`probe live`, which asks anew"
            raise UsageError(f"probe: {said} belongs to {where}; leave it out")


def _live(ask: Ask, as_json: bool) -> int:
    start = prepare_live(ask, argv())
    typer.echo(f"{start.run.run_id}: asking {', '.join(ask.arms)}; ctrl-c stops it", err=True)
    with _interrupts() as stopped:
        status = carry_out(start, stopped)
        from core.pipeline.probe_report import report_of

        report = report_of(start.run, status)
        write_atomic(start.run.probe, encode_line(report))
    if as_json:
        emit(report)
    else:
        console("probe", str(start.run.path), "--plain")
    if status.exit_code:
        return status.exit_code
    return EXIT_DONE if report.complete else EXIT_FAILED


@contextmanager
def _interrupts() -> Iterator[Stopped]:
    """ctrl-c and SIGTERM are counted, not obeyed: what was asked is halted, settled and booked."""
    stopped = Stopped()
    numbers = (signal.SIGINT, signal.SIGTERM)

    def stop(*_: object) -> None:
        stopped.count += 1
        more = "what is paid for is still received, ctrl-c again cuts it off"
        typer.echo(f"halting; {more}" if stopped.count == 1 else "cutting off", err=True)

    before = [signal.signal(number, stop) for number in numbers]
    try:
        yield stopped
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
