"""Pictures for the README: the console on a recorded run, drawn without a terminal.

`python -m tests.data.make_screenshots [FOLDER]` writes the same SVG files every time (default:
screenshots/).
"""

import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

os.environ.update(TEXTUAL_ANIMATIONS="none", TERM="xterm-256color", COLORTERM="truecolor", TZ="UTC")
os.environ.pop("NO_COLOR", None)
os.environ.pop("TEXTUAL_THEME", None)
time.tzset()

from unittest import mock  # noqa: E402

from console import probe  # noqa: E402
from core.config import Console as ConsoleConfig  # noqa: E402
from tests.console.recorded_run import Letters, write_run  # noqa: E402
from tests.console.still import StillApp  # noqa: E402

FOLDER = Path(__file__).resolve().parents[2] / "screenshots"

# name: phase of the recording, size, keys, theme
SHOTS: dict[str, tuple[str, tuple[int, int], tuple[str, ...], str]] = {
    "board-80x24": ("generate", (80, 24), (), "eyas-dark"),
    "board-120x36": ("generate", (120, 36), (), "eyas-dark"),
    "board-light": ("generate", (120, 36), (), "eyas-light"),
    "training-120x36": ("train", (120, 36), ("5",), "eyas-dark"),
    "halted-120x36": ("halted", (120, 36), (), "eyas-dark"),
    "tripped-80x24": ("tripped", (80, 24), (), "eyas-dark"),
    "probe-list": ("done", (120, 30), ("p",), "eyas-dark"),
    "probe-diff": ("done", (120, 36), ("p", "down", "enter", "n"), "eyas-dark"),
    "probe-flow": ("done", (100, 24), ("p", "down", "enter", "t"), "eyas-dark"),
    "probe-table": ("done", (120, 36), ("p", "down", "enter", "t", "t"), "eyas-dark"),
    "summary": ("done", (100, 30), ("s",), "eyas-dark"),
    "help": ("generate", (100, 48), ("question_mark",), "eyas-dark"),
}


async def shoot(name: str, folder: Path) -> None:
    phase, size, keys, theme = SHOTS[name]
    with tempfile.TemporaryDirectory() as runs:
        run = write_run(Path(runs), phase, Letters())
        app = StillApp(phase, run, config=ConsoleConfig(theme=theme))
        async with app.run_test(size=size) as pilot:
            for key in (None, *keys, None):
                if key is not None:
                    await pilot.press(key)
                for _ in range(8):  # lists and samples are read in threads
                    await pilot.pause(0.05)
                    app.paint()
            svg = app.export_screenshot(title="eyas")
    (folder / f"{name}.svg").write_text(svg, encoding="utf-8")


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(exist_ok=True)
    with mock.patch.object(
        probe, "_renderer", lambda run: (SimpleNamespace(tokenizer=Letters()), "")
    ):
        for name in SHOTS:
            asyncio.run(shoot(name, folder))
            sys.stdout.write(f"{folder / name}.svg\n")


if __name__ == "__main__":
    main()
