"""What a soak saw, leg by leg, and how it is printed."""

from collections import Counter

import msgspec


class Seen(msgspec.Struct, kw_only=True):
    """What one leg, or all of them, did."""

    prompts: int = 0
    requests: int = 0
    lives: int = 0
    peak: int = 0
    outcomes: Counter[str] = msgspec.field(default_factory=Counter)
    classes: Counter[str] = msgspec.field(default_factory=Counter)
    closings: Counter[str] = msgspec.field(default_factory=Counter)
    hits: Counter[str] = msgspec.field(default_factory=Counter)
    booked_usd: float = 0.0
    billed_usd: float = 0.0
    unknown: int = 0
    unproven_usd: float = 0.0
    rss_bytes: int = 0
    objects: int = 0

    def add(self, other: "Seen") -> None:
        for name in self.__struct_fields__:
            mine, more = getattr(self, name), getattr(other, name)
            if isinstance(mine, Counter):
                mine.update(more)
            elif name in ("peak", "rss_bytes", "objects"):
                setattr(self, name, max(mine, more))
            else:
                setattr(self, name, mine + more)


HEADER = (
    f"{'leg':>3} {'prompts':>8} {'requests':>9} {'lives':>5} {'peak':>5} {'ok':>6} {'rej.':>6} "
    f"{'failed':>6} {'ref.':>5} {'booked $':>13} {'billed $':>13} {'diff.':>8} {'unknown':>8} "
    f"{'unproven $':>11} {'RSS MB':>7} {'objects':>8} {'CPU s':>6}"
)


def row(number: int | str, seen: Seen, cpu_s: float) -> str:
    o = seen.outcomes
    return (
        f"{number:>3} {seen.prompts:>8} {seen.requests:>9} {seen.lives:>5} {seen.peak:>5} "
        f"{o['ok']:>6} {o['rejected']:>6} {o['failed']:>6} {o['refused']:>5} "
        f"{seen.booked_usd:>13.9f} {seen.billed_usd:>13.9f} "
        f"{abs(seen.booked_usd - seen.billed_usd):>8.0e} {seen.unknown:>8} "
        f"{seen.unproven_usd:>11.9f} {seen.rss_bytes / 1e6:>7.1f} {seen.objects:>8} {cpu_s:>6.1f}"
    )


def columns(title: str, counts: Counter[str]) -> str:
    cells = [f"{name} {n}" for name, n in counts.most_common()]
    lines = ["   ".join(f"{c:<32}" for c in cells[i : i + 4]) for i in range(0, len(cells), 4)]
    return "\n  ".join([f"{title}:", *(line.rstrip() for line in lines)])
