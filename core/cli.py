"""`eyas`: the command line's first lines. HALT takes the short way, everything else goes to
core.commands.

Promises: `eyas halt RUN` imports nothing but the standard library. Errors are one line, with the
exit codes of core.errors; a traceback only with --debug."""

import sys


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments[:1] == ["halt"]:
        from core.halting import main as halt

        return halt(arguments[1:])
    from core.commands import main as others  # typer and msgspec are only loaded on this way

    return others(arguments)


if __name__ == "__main__":
    sys.exit(main())
