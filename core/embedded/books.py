"""Append-only lines of the gateway (truth, books, log), and the account's memory across restarts
of the process."""

import os
from pathlib import Path
from typing import Any

import msgspec

from core.embedded.billing import Charge
from core.errors import UsageError


class Lines:
    """One JSON line per write, in one system call, so that a kill tears at most the last one."""

    def __init__(self, path: Path | None) -> None:
        self._file: int | None = None
        if path is not None:
            try:
                self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            except OSError as e:
                raise UsageError(f"{path}: cannot be written ({e.strerror}); name another") from e

    def write(self, value: Any) -> None:
        if self._file is not None:
            os.write(self._file, msgspec.json.encode(value) + b"\n")

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def read_books(path: Path | None) -> list[Charge]:
    """Charges of earlier lives, last line of each id. One that a kill left open is closed free of
    charge."""
    if path is None or not path.exists():
        return []
    data = path.read_bytes()
    complete = data[: data.rfind(b"\n") + 1]
    if len(complete) < len(data):
        # The torn line of a kill: cut, so that the next one starts on a line of its own.
        os.truncate(path, len(complete))
    charges: dict[str, Charge] = {}
    decoder = msgspec.json.Decoder(Charge)
    for number, line in enumerate(complete.splitlines(), 1):
        try:
            charge = decoder.decode(line)
        except msgspec.DecodeError as e:
            raise UsageError(f"{path}:{number}: not a charge: {e}; remove the file") from e
        charges[charge.id] = charge
    for charge in charges.values():
        if charge.cost_pico is None:
            charge.cost_pico, charge.cancelled, charge.finished = 0, True, charge.created
    return list(charges.values())
