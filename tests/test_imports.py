"""The import direction at run time: what a process really loads, each in its own interpreter."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ENGINE = (
    "core.pipeline.process",
    "core.pipeline.rebuild",
    "core.pipeline.auditing",
    "core.commands",
    "core.generate",
    "core.prompts",
    "core.reconstruct",
    "core.tokens",
)
SERVICES = ("core.store", "core.journal", "core.control", "core.view", "core.config", "core.gpu")
HEAVY = ("torch", "transformers")
SCREEN = ("console", "textual", "rich")


def loaded(statement: str) -> set[str]:
    """Top-level names in sys.modules after a statement, in a fresh interpreter."""
    code = f"{statement}\nimport sys\nprint(*sorted({{m.split('.')[0] for m in sys.modules}}))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    return set(done.stdout.split())


def test_engine_modules_load_neither_torch_nor_a_screen() -> None:
    seen = loaded("import " + ", ".join(ENGINE))
    assert seen & {*HEAVY, *SCREEN} == set()
    assert {"core", "aiohttp", "msgspec"} <= seen  # the probe itself works


@pytest.mark.parametrize("module", SERVICES)
def test_what_every_reader_loads_is_light(module: str) -> None:
    heavy = {*HEAVY, *SCREEN, "pyarrow", "scipy", "numpy", "aiohttp", "typer"}
    assert loaded(f"import {module}") & heavy == set()


def test_the_command_line_does_not_wait_for_the_audit() -> None:
    assert loaded("import core.commands") & {*HEAVY, *SCREEN, "scipy", "pyarrow"} == set()


def test_torch_stages_never_load_a_screen() -> None:
    seen = loaded("import core.extract, core.drafter.train, core.drafter.export")
    assert "torch" in seen and seen & set(SCREEN) == set()


def test_the_halt_path_loads_the_standard_library_alone() -> None:
    """`-I -S` leaves no third-party package to load, so this fails as soon as one is needed."""
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from core.cli import main\n"
        "code = main(['halt', 'no-such-run'])\n"
        "outside = {m for m in sys.modules if m.split('.')[0] not in sys.stdlib_module_names}\n"
        "print(code, *sorted(outside - {'core', 'core.cli', 'core.halting', '__main__'}))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["2"]
    assert done.stderr == (
        "eyas: no-such-run: no such run in runs; `eyas list` shows the runs, a path works too\n"
    )
