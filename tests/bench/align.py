"""Aligning two lists of 32,000 token ids, as the probe does: CPU time of one difference.

    python -m tests.bench.align [TOKENS]

One line a case: milliseconds (best and worst of five), rows that are equal, hunks. The target is
100 ms. `compared` is one pass over both lists in plain Python, to read the times by.
"""

import random
import statistics
import sys
import time
from collections.abc import Callable

from console.widgets.align import difference

TARGET_MS = 100.0
ROUNDS = 5
Pair = tuple[list[int], list[int]]


def text(dice: random.Random, tokens: int) -> list[int]:
    """Ids that repeat as a text's do: the n-th most frequent word comes with odds of 1/n."""
    odds = [1 / n for n in range(1, 20_001)]
    return dice.choices(range(20_000), odds, k=tokens)


def edited(dice: random.Random, ids: list[int], share: float) -> list[int]:
    """A third each changed, lost and added."""
    out: list[int] = []
    for i in ids:
        kind = dice.randrange(3) if dice.random() < share else 3
        if kind != 1:
            out.append(i if kind else 20_000 + i)
        if kind == 2:
            out.append(dice.randrange(20_000))
    return out


def cases(tokens: int) -> dict[str, Pair]:
    dice = random.Random(1)
    ids = text(dice, tokens)
    period = text(dice, 40)
    repeats = period * (tokens // 40)
    flat = [7] * tokens
    few = dice.choices(range(20), k=tokens)
    return {
        "equal": (ids, list(ids)),
        "one token inserted near the front": (ids, [*ids[:5], 5, *ids[5:]]),
        "one changed near each end": ([1, *ids, 1], [2, *ids, 2]),
        "1 % scattered edits": (ids, edited(dice, ids, 0.01)),
        "10 % scattered edits": (ids, edited(dice, ids, 0.10)),
        "50 % edited": (ids, edited(dice, ids, 0.50)),
        "another text": (ids, text(dice, tokens)),
        "nothing in common": (ids, [i + 20_000 for i in ids]),
        "one half lost": (ids, ids[tokens // 2 :]),
        "halves swapped": (ids, ids[tokens // 2 :] + ids[: tokens // 2]),
        "a period of 40, 1 % edits": (repeats, edited(dice, repeats, 0.01)),
        "a period of 40, shifted by 17": (repeats, repeats[17:] + repeats[:17]),
        "one id, a few others among them": (flat, edited(dice, flat, 0.01)),
        "one id, 100 fewer": ([1, *flat, 2], [3, *flat[100:], 4]),
        "20 ids, 10 % edits": (few, edited(dice, few, 0.10)),
        "20 ids, unrelated": (few, dice.choices(range(20), k=tokens)),
        "one against all": ([9], ids),
    }


def cpu_ms(work: Callable[[], object]) -> list[float]:
    times = []
    for _ in range(ROUNDS):
        before = time.process_time()
        work()
        times.append(1e3 * (time.process_time() - before))
    return times


def main() -> int:
    tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 32_000
    difference([1, 2], [2, 1])  # the library's import is no part of it
    missed = 0
    one = text(random.Random(2), tokens)
    plain = statistics.median(cpu_ms(lambda: sum(a == b for a, b in zip(one, one, strict=True))))
    print(f"{tokens:,} tokens a side; compared once in plain Python: {plain:.1f} ms")
    print(f"{'case':<34}{'best':>8}{'worst':>8}{'equal':>9}{'hunks':>8}")
    for name, (left, right) in cases(tokens).items():
        times = cpu_ms(lambda left=left, right=right: difference(left, right))
        diff = difference(left, right)
        equal = len(diff.rows) - len(diff.rows.differing())
        late = "" if max(times) <= TARGET_MS else f"  above {TARGET_MS:.0f} ms"
        missed += bool(late)
        print(
            f"{name:<34}{min(times):>6.1f}ms{max(times):>6.1f}ms{equal:>9,}{len(diff.hunks):>8,}{late}"
        )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
