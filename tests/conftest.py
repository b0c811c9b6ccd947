"""What every test gets: a private, short-pathed runtime folder, so that sockets and spools of real
runs are not touched."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[1] / ".." / "shared"


@pytest.fixture(autouse=True)
def runtime_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="eyas-t"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.delenv("EYAS_RUNS", raising=False)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
