"""Ground truth of an audit as a table: how often a rebuild from text had the ids that were sampled.

Knows the Audit event's `exactness`, nothing about screens.
"""

from typing import Any

from console.sanitize import clean
from console.widgets.line import Part

COLUMNS = (("rebuilt from text", "<"), ("count", ">"), ("exact", ">"), ("95 % interval", ">"))


def rows(exact: dict[str, Any]) -> list[list[Part]]:
    """One row a kind of segment, whole replies last; none when nothing was measured."""
    samples = exact.get("samples")
    if not isinstance(samples, int) or not samples:
        return []
    kinds = [(clean(k), v) for k, v in exact.items() if isinstance(v, dict)]
    return [_row(k, v) for k, v in [*kinds, ("whole reply", {**exact, "segments": samples})]]


def note(exact: dict[str, Any]) -> str:
    consistent, false = exact.get("consistent", 0), exact.get("false", 0)
    return f"of {consistent} rebuilds called consistent, {false} have other ids than were sampled"


def _row(kind: str, shares: dict[str, Any]) -> list[Part]:
    count, exact = shares.get("segments", 0), shares.get("exact", 0)
    low, high = shares.get("low", 0.0), shares.get("high", 1.0)
    interval = f"{low:.2%} - {high:.2%}"
    texts = (kind, f"{count:,}", f"{exact / max(1, count):.2%}", interval)
    return [(text, "text") for text in texts]
