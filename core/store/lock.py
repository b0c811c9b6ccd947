"""One at a time on a run directory: its engine, or a command that rewrites what an engine reads."""

import contextlib
import fcntl
from collections.abc import Iterator

from core.errors import StoreError
from core.store.rundir import RunDir


@contextlib.contextmanager
def only_one(run: RunDir) -> Iterator[None]:
    """Hold the run directory's lock; the kernel gives it back when the process ends, however it
    ends. Raises StoreError when another process has it."""
    try:
        lock = (run.path / ".lock").open("wb")
    except OSError as e:
        raise StoreError(f"{run.path}: cannot be written ({e.strerror}); check the folder") from e
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise StoreError(
                f"{run.path}: an engine of this run is alive (`eyas attach {run.run_id}` opens "
                "it), or an audit is being applied to it; wait for its end"
            ) from e
        yield
