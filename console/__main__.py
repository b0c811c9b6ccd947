"""`python -m console`: the screen on a run, or lines and tables where there is none.

    python -m console [RUN] [--read-only] [--plain] [--replay SPEED]
    python -m console list | status RUN | watch RUN | audit RUN
    python -m console probe RUN [SAMPLE] [--against SAMPLE]
    python -m console report RUN

A dumb terminal, or none at all, gets lines. Exit codes are those of eyas.
"""

import argparse
import asyncio
import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from core.store import RunDir

# Textual reads these once, when it is first imported.
os.environ.setdefault("TEXTUAL_ANIMATIONS", "none")
os.environ.setdefault("TEXTUAL_SMOOTH_SCROLL", "0")
os.environ.setdefault("TEXTUAL_FPS", "10")

PAGES = ("list", "status", "watch", "probe", "audit", "report")


def main(arguments: list[str] | None = None) -> int:
    """Parse, choose the face, run it."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    from core.errors import EXIT_DONE, EyasError

    try:
        if words and words[0] in PAGES:
            return _page(words)
        return _screen(words)
    except EyasError as e:
        sys.stderr.write(f"eyas: {e}\n")
        return e.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("eyas: left; the run keeps going (eyas halt RUN stops it)\n")
        return EXIT_DONE
    except BrokenPipeError:  # `eyas list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_DONE


def _page(words: list[str]) -> int:
    from console import plain
    from core.store import find_run

    parser = argparse.ArgumentParser(prog=f"eyas {words[0]}")
    if words[0] != "list":
        parser.add_argument("run")
    if words[0] == "probe":
        parser.add_argument("sample", nargs="?", default="")
        parser.add_argument("--against", default="")
    _common(parser)
    options = parser.parse_args(words[1:])
    _choose_folder(options.runs)
    if words[0] == "list":
        return plain.show_list(options.runs)
    run = find_run(options.run)
    match words[0]:
        case "status":
            return plain.show_status(run)
        case "watch":
            return asyncio.run(_watch(run))
        case "probe":
            return _probe(run, options)
        case "audit":
            return plain.show_audit(run)
        case _:
            return plain.show_report(run)


def _common(parser: argparse.ArgumentParser) -> None:
    """Options of everything that may open the screen."""
    parser.add_argument(
        "--read-only", action="store_true", help="watch only: no key can change the run"
    )
    parser.add_argument("--plain", action="store_true", help="lines instead of a screen")
    parser.add_argument(
        "--replay", type=float, default=0.0, metavar="SPEED", help="play the journal again"
    )
    parser.add_argument("--runs", type=Path, help="folder of the runs")
    parser.add_argument("--ascii", action="store_true", help="no glyphs outside ASCII")
    parser.add_argument(
        "--low-bandwidth", action="store_true", help="1 Hz, terminal colours, no plots"
    )


def _screen(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="eyas", description="the console of eyas")
    parser.add_argument("run", nargs="?", default="")
    _common(parser)
    options = parser.parse_args(words)
    _choose_folder(options.runs)
    from core.store import find_run

    run = find_run(options.run) if options.run else None
    if options.plain or not can_draw():
        from console import plain

        return asyncio.run(_watch(run)) if run else plain.show_list(options.runs)

    return _open(run, options)


def _open(run: "RunDir | None", options: argparse.Namespace, *probing: Any) -> int:
    """The screen; `probing`: the sample's row and what to compare it with, or nothing."""
    import msgspec

    from console.app import ConsoleApp, Probing
    from console.driver import utf8_stdio
    from core.config import Console

    config = (
        run.load_config().console if run is not None and run.config_toml.exists() else Console()
    )
    config = msgspec.structs.replace(
        config,
        ascii=config.ascii or options.ascii,
        low_bandwidth=config.low_bandwidth or options.low_bandwidth,
    )
    utf8_stdio()
    first = Probing(*probing) if probing else None
    app = ConsoleApp(run, options.read_only, config, options.runs, options.replay, first)
    app.run()
    if app.left_running:
        with contextlib.suppress(OSError):  # the terminal may be what went away
            name = app.left_running
            sys.stderr.write(f"{name} keeps running: eyas attach {name} | eyas halt {name}\n")
    return app.return_code or 0


def _probe(run: "RunDir", options: argparse.Namespace) -> int:
    """In the console where there is a screen; a live probe's page is lines everywhere."""
    from console.plain_probe import show_probe

    if options.plain or not can_draw() or (run.probe.exists() and not options.sample):
        return show_probe(run, options.sample, options.against)
    from console import probe
    from core.journal import load_view

    row = None
    if options.sample:
        row = probe.find_row(run, options.sample, load_view(run).outcomes)
    if options.against:
        probe.find_row(run, options.against)  # refused here, not on a screen
    return _open(run, options, row, options.against)


async def _watch(run: "RunDir") -> int:
    from console.watch import watch

    return await watch(run)


def can_draw() -> bool:
    """Whether there is a terminal that can place a cursor."""
    return (
        os.environ.get("TERM", "") not in ("dumb", "")
        and sys.stdin.isatty()
        and sys.stdout.isatty()
    )


def _choose_folder(folder: Path | None) -> None:
    if folder is not None:
        os.environ["EYAS_RUNS"] = str(folder)


if __name__ == "__main__":
    sys.exit(main())
