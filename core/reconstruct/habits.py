"""Ways of writing that a provider may take away: blanks at the edges of texts, the spelling of
arguments.

Says what one reply shows; what many prove is `core.conventions`. Pure.
"""

import json
from collections.abc import Sequence

from core.reconstruct.completion import Item
from core.schema import ToolCall


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
