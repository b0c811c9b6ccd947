"""The errors of eyas: one class per boundary, each with a stable `kind` and an exit code.

    EyasError
    ├── UsageError      2  command line, config, prompts, tokenizer directory: the user can mend it
    │   ├── ConfigError
    │   ├── PromptError
    │   └── TokenizerError
    ├── RenderError     1  a request that must not be sent (history_tool_id_nonnative, ...)
    ├── ProviderError   1  anything that a backend did; carries the outcome class
    ├── StoreError      1  run directory, journal, shards, disk
    │   └── DiskFull
    ├── ControlError    1  control socket
    ├── CaptureError    1  hidden states that do not belong to the ids
    ├── TrainError      1  NaN, dead loss, resume contract broken
    ├── ExportError     1  a checkpoint or export that an engine would misread
    ├── Halted          3  the operator stopped the run
    └── Tripped         4  a tripwire stopped the run

A message is one line: what, where, what to do. The command line prints it after `eyas: ` and
nothing else. It may quote a model, an API or a file: what a terminal would obey becomes a blank.
"""

from collections.abc import Iterator
from contextlib import contextmanager

EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXIT_HALTED, EXIT_TRIPWIRE = 0, 1, 2, 3, 4


def printable(text: str) -> str:
    """Text from outside for one line: what a terminal would obey becomes a blank."""
    return "".join(c if c.isprintable() else " " for c in text)


class EyasError(Exception):
    """Base of every error that a person may read. `kind` is stable and machine-readable."""

    exit_code = EXIT_FAILED

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(printable(message))
        self.kind = kind or type(self).__name__


class UsageError(EyasError):
    exit_code = EXIT_USAGE


class ConfigError(UsageError):
    pass


class PromptError(UsageError):
    pass


class TokenizerError(UsageError):
    pass


class RenderError(EyasError):
    pass


class ProviderError(EyasError):
    pass


class StoreError(EyasError):
    pass


class DiskFull(StoreError):
    pass


class ControlError(EyasError):
    pass


class CaptureError(EyasError):
    pass


class TrainError(EyasError):
    pass


class ExportError(EyasError):
    pass


class Halted(EyasError):
    exit_code = EXIT_HALTED


class Tripped(EyasError):
    exit_code = EXIT_TRIPWIRE


@contextmanager
def boundary(error: type[EyasError], what: str) -> Iterator[None]:
    """An EyasError passes; any other Exception leaves as `error` with the place in front of it."""
    try:
        yield
    except EyasError:
        raise
    except Exception as cause:
        raise error(f"{what}: {type(cause).__name__}: {cause}") from cause
