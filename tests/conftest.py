"""What every test gets: a private, short-pathed runtime folder, so that sockets and spools of real
runs are not touched."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# In CI the same change gets the same examples; everywhere else new ones are tried each time.
settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
if os.environ.get("CI"):
    settings.load_profile("ci")

SHARED = Path(__file__).resolve().parents[1] / ".." / "shared"


@pytest.fixture(autouse=True)
def runtime_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="eyas-t"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.delenv("EYAS_RUNS", raising=False)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
