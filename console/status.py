"""Glyph + word + colour of everything that has a state. The word alone is enough; colour only
repeats it.
"""

from typing import NamedTuple


class Mark(NamedTuple):
    glyph: str
    word: str
    style: str

    @property
    def text(self) -> str:
        return f"{self.glyph} {self.word}"


RUN: dict[str, Mark] = {
    "starting": Mark("○", "STARTING", "dim"),
    "running": Mark("●", "RUNNING", "ok"),
    "draining": Mark("◐", "DRAINING", "warn"),
    "halting": Mark("◐", "HALTING", "warn"),
    "halted": Mark("■", "HALTED", "warn"),
    "tripped": Mark("▲", "TRIPPED", "error"),
    "done": Mark("✓", "DONE", "ok"),
    "failed": Mark("✗", "FAILED", "error"),
    "crashed": Mark("✗", "CRASHED", "error"),
    "unknown": Mark("?", "UNKNOWN", "text"),
}

STAGE: dict[str, Mark] = {
    "waiting": Mark("○", "waiting", "dim"),
    "running": Mark("●", "running", "accent"),
    "stopped": Mark("■", "stopped", "warn"),
    "done": Mark("✓", "done", "ok"),
    "failed": Mark("✗", "failed", "error"),
}

VERDICT: dict[str, Mark] = {
    "exact": Mark("●", "exact", "ok"),
    "consistent": Mark("○", "consistent", "ok"),
    "hypothesis": Mark("◇", "hypothesis", "warn"),
    "mismatch": Mark("≠", "mismatch", "error"),
    "unverifiable": Mark("?", "unverifiable", "warn"),
    "rejected": Mark("✗", "rejected", "error"),
}

BREAKER: dict[str, Mark] = {
    "closed": Mark("●", "open for work", "ok"),
    "half_open": Mark("◐", "probing", "warn"),
    "open": Mark("▲", "paused", "error"),
}

LOG: dict[str, Mark] = {
    "info": Mark("·", "info", "dim"),
    "warn": Mark("▲", "warn", "warn"),
    "error": Mark("✗", "error", "error"),
}

LINK: dict[str, Mark] = {
    "connecting": Mark("○", "connecting", "dim"),
    "live": Mark("●", "live", "ok"),
    "files": Mark("○", "from files", "dim"),
    "replay": Mark("▶", "replay", "extra"),
    "lost": Mark("▲", "link lost", "error"),
    "ended": Mark("■", "ended", "dim"),
}


def mark(table: dict[str, Mark], key: str) -> Mark:
    """An unknown word is shown as it is: a newer engine must not break an older console."""
    return table.get(key) or Mark("?", key or "unknown", "text")
