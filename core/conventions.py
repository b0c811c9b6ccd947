"""What a provider does the same way in every reply: whether it counts the stop token, and what it
takes away. One rule each, for the verdicts and for the audit alike.

One reply proves nothing: a trimmed blank keeps the token count in nine cases of ten (case C49).
Many do: what the model often shows on a local server and never through a provider was taken away
there. Pure; cannot see what a provider takes away only sometimes.
"""

import math
from collections.abc import Mapping, Sequence

from core.schema import Sample

LEARN_SAMPLES = 50
"""Clean replies after which a stop-token offset is held."""
FEW_SAMPLES = 8
"""Below this, one reply that disagrees leaves nothing proven."""
MIXED_SHARE = 0.1
SPLIT_SHARE = 1 / 3
"""A model that samples other splits of words makes replies of a provider that leaves the stop token
out seem to count it. So many of those may stray; they are refused once the offset is held."""
LOST_ALPHA = 1e-3
"""A habit counts as lost when replies as the model writes them would all lack it less often than
this. An error refuses right ids: at a few habits and providers, in one run of fifty."""

Seen = Mapping[str, Mapping[str, Sequence[int]]]
"""Dataset -> habit -> (replies that show it, replies that could)."""

COUNTED = ("consistent", "hypothesis", "mismatch")
"""Verdicts that rest on the billed count."""
_SUSPECT = frozenset({"spaced_markers", "special_like_text", "tool_id_foreign"})
"""Flags of replies that may fit a count by accident."""


def is_suspect(sample: Sample) -> bool:
    return not _SUSPECT.isdisjoint(sample.flags)


def stop_offset(sample: Sample) -> int | None:
    """Billed minus rebuilt tokens, where the verdict rests on both."""
    if sample.verdict not in COUNTED or sample.billed_tokens is None:
        return None
    return None if sample.rebuilt_tokens is None else sample.billed_tokens - sample.rebuilt_tokens


def is_mixed(counted: int, left_out: int) -> bool:
    """Whether replies that count the stop token and replies that do not cannot be one convention
    and its accidents."""
    total, strays = counted + left_out, min(counted, left_out)
    share = MIXED_SHARE if counted >= left_out else SPLIT_SHARE
    return strays > (max(1, share * total) if total >= FEW_SAMPLES else 0)


def lost_habits(model: Seen, provider: Seen) -> dict[str, float]:
    """Habits that the provider has never shown although the model has them, each with the chance of
    that: compared within each dataset, because what is asked decides how it is answered."""
    names = {name for seen in provider.values() for name in seen}
    chances = {name: math.exp(_log_chance(name, model, provider)) for name in sorted(names)}
    return {name: chance for name, chance in chances.items() if chance < LOST_ALPHA}


def _log_chance(name: str, model: Seen, provider: Seen) -> float:
    """Log probability that no reply of the provider shows it if its replies were drawn from one
    urn with the model's own: hypergeometric, C(m, k) / C(m + n, k) for k of the model's m replies
    and none of n; a product over datasets."""
    total = 0.0
    for dataset, seen in provider.items():
        shown, could = seen.get(name, (0, 0))
        if shown:
            return 0.0
        theirs, of = model.get(dataset, {}).get(name, (0, 0))
        if theirs:
            total += _log_choose(of, theirs) - _log_choose(of + could, theirs)
    return total


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
