"""Ways of writing that a provider may take away: blanks at the edges of texts, the spelling of
arguments.

One reply proves nothing: a trimmed blank keeps the token count in nine cases of ten (case C49).
Many do: what the model often shows on a local server and never through a provider was taken away
there. Pure; cannot see what a provider takes away only sometimes.
"""

import json
import math
from collections.abc import Mapping, Sequence

from core.reconstruct.completion import Item
from core.schema import ToolCall

LOST_ALPHA = 1e-3
"""A habit counts as lost when replies as the model writes them would all lack it less often than
this. An error refuses right ids: at a few habits and providers, in one run of fifty."""

Seen = Mapping[str, Mapping[str, Sequence[int]]]
"""Dataset -> habit -> (replies that show it, replies that could)."""


def habits_of(
    items: Sequence[Item], kinds: Sequence[str], calls: Sequence[ToolCall]
) -> dict[str, bool]:
    """Whether the reply shows each habit; habits that it could not show are left out."""
    shown: dict[str, bool] = {}
    for item, kind in zip(items, kinds, strict=True):
        if not item.text or kind not in ("reasoning", "content"):
            continue
        shown.setdefault(f"{kind}_starts_blank", item.text[0].isspace())
        shown.setdefault(f"{kind}_ends_blank", item.text[-1].isspace())
    for call in calls:
        for name, value in _spelling(call.arguments).items():
            shown[name] = shown.get(name, False) or value
    return shown


def _spelling(arguments: str) -> dict[str, bool]:
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(value, dict) or not value:
        return {}
    colon = arguments.find('":')
    spaced = arguments[colon + 2 : colon + 3].isspace()
    shown = {"arguments_spaced": spaced, "arguments_compact": not spaced}
    if len(value) > 1:
        shown["arguments_unsorted"] = list(value) != sorted(value)
    return shown


def lost_habits(model: Seen, provider: Seen) -> set[str]:
    """Habits that the provider has never shown although the model has them: compared within each
    dataset, because what is asked decides how it is answered."""
    names = {name for seen in provider.values() for name in seen}
    limit = math.log(LOST_ALPHA)
    return {name for name in names if _log_chance(name, model, provider) < limit}


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
