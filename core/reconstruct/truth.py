"""Ground truth: a reply that came with its ids, rebuilt from its text as if there were none.

Gives both completions side by side; scoring them is the audit's business. Knows one reply.
"""

from typing import NamedTuple

import msgspec

from core.reconstruct.rebuild import Ask, Rebuilt, rebuild
from core.reconstruct.reply import Reply
from core.render.base import Renderer
from core.schema import Usage


class Twice(NamedTuple):
    """`true`: the sampled ids. `told`: the rebuild from text, without hypotheses. `consistent`:
    what the true count makes of it. `parsed`: the text came as the server's own fields, not as one
    string with markers."""

    true: Rebuilt
    told: Rebuilt
    consistent: bool
    parsed: bool


def rebuilt_twice(reply: Reply, ask: Ask, renderer: Renderer) -> Twice | None:
    """None where the truth is not known: no ids, no text, or ids that are no sound completion.

    The count that the text path may use is the true one, under the server's own stop-token offset:
    what is measured is text, not billing.
    """
    if reply.ids is None:
        return None
    true = rebuild(reply, ask, renderer)
    if true.verdict != "exact":
        return None
    parsed = reply.text is None
    if not parsed:
        reply = _as_content(reply, renderer)
    blind = msgspec.structs.replace(
        reply,
        ids=None,
        prompt_ids=None,
        text=None,
        usage=Usage(completion_tokens=len(true.ids)),
    )
    known = msgspec.structs.replace(ask, allowed=(0,), max_tokens=None)
    told = rebuild(blind, known, renderer)
    consistent = told.verdict == "consistent"
    if told.verdict == "hypothesis":
        uncounted = msgspec.structs.replace(blind.usage, completion_tokens=None)
        told = rebuild(msgspec.structs.replace(blind, usage=uncounted), known, renderer)
    return Twice(true, told, consistent, parsed)


def _as_content(reply: Reply, renderer: Renderer) -> Reply:
    """`/generate` returns one string: what a chat endpoint without parsers puts into `content`."""
    text = reply.text or ""
    if renderer.end_id is not None:
        text = text.removesuffix(renderer.tokenizer.decode([renderer.end_id]))
    return msgspec.structs.replace(reply, content=text)
