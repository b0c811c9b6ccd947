"""`python -m core WHAT ...`: how eyas starts its own processes. People use `eyas` (core/cli.py)."""

import signal
import sys


def main(argv: list[str]) -> int:
    what, arguments = (argv or [""])[0], argv[1:]
    if what == "engine":
        from core.pipeline.process import main as engine

        return engine(arguments)
    if what == "stage" and "--child" in arguments:
        from core.pipeline.child import main as stage

        return stage(arguments)
    if what == "gateway":
        from core.embedded.gateway import main as gateway

        return gateway(arguments)
    if what == "judge":
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):  # the engine's to hear
            signal.signal(number, signal.SIG_IGN)
        from core.pipeline.judge_process import main as judge

        return judge(arguments)
    from core.cli import main as cli  # `python -m core halt RUN` does what `eyas halt RUN` does

    return cli(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
