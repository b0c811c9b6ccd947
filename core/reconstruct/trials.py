"""What each named hypothesis makes of a reply: the evidence behind a verdict, for those who look.

Judges nothing; `judging` has done that."""

from typing import NamedTuple

from core.reconstruct.completion import encode, walk
from core.reconstruct.hypotheses import hypotheses
from core.reconstruct.judging import ask_of
from core.reconstruct.reply import read_reply
from core.render.base import Renderer
from core.schema import Prompt, Rollout, reply_text


class Trial(NamedTuple):
    """`tokens`: of the completion as the hypothesis has it. `sound`: its structure is a whole
    reply's."""

    name: str
    tokens: int
    sound: bool


def trials(rollout: Rollout, prompt: Prompt, renderer: Renderer, billed: int | None) -> list[Trial]:
    """One a hypothesis: of its forms, the one whose count comes nearest to `billed`. None for a
    reply with ids, and for a family without a grammar."""
    reply = read_reply(rollout.reply_kind, reply_text(rollout), rollout.status, rollout.headers)
    grammar = renderer.grammar
    if reply.ids is not None or grammar is None:
        return []
    ask = ask_of(rollout.request, prompt.messages, prompt.thinking)
    thinks = prompt.thinking and grammar.think_close is not None
    best: dict[str, Trial] = {}
    for name, draft in hypotheses(reply, grammar, thinks, ask.prior_calls):
        walked = walk(draft.items, thinks, grammar.prompt_opens_think)
        tokens = len(encode(draft.items, walked.kinds, renderer.tokenizer).ids)
        one = Trial(name, tokens, not walked.problems)
        held = best.get(name)
        if held is None or _off(one, billed) < _off(held, billed):
            best[name] = one
    return list(best.values())


def _off(trial: Trial, billed: int | None) -> tuple[bool, int]:
    return not trial.sound, abs(trial.tokens - (billed or 0))
