"""Acceptance by the exact offline walk and by real speculative decoding, counted by the same rule.

A reply x_P..x_E is produced by the prefill (x_P) and a number of steps. A step starts at position s
knowing x_{s+1}, drafts K tokens for s+2.., and keeps the leading right ones plus the target's own
next token, never past x_E. The walk reads n from teacher-forced chains (the drafts of a chain are
right only if all before them are, so feeding the text's own tokens asks the same question);
decoding counts what the target verified. Knows tensors and ids only."""

# T positions, H hidden size, C = 4 captured states, X = 3H aux states, K draft tokens, N columns, D
# draft vocabulary

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from transformers import DynamicCache

from core.drafter.columns import columns_of
from core.drafter.model import Drafter
from core.schema import AcceptanceCounts
from core.target import Target


@dataclass(frozen=True)
class Steps:
    """One reply's steps: `start[i]` is the position s, `right[i]` the drafts that were right.
    `last` is E."""

    start: list[int]
    right: list[int]
    last: int


def chain_right(
    drafter: Drafter, ids_T: torch.Tensor, aux_TX: torch.Tensor, prompt_len: int, draft_tokens: int
) -> torch.Tensor:
    """[T] number of leading right drafts of the chain that starts at each position, 0 before P - 1.

    A draft for a position past the text's end is not right.
    """
    length = ids_T.numel()
    wanted_1T = torch.zeros(1, length, dtype=torch.bool, device=aux_TX.device)
    wanted_1T[0, prompt_len - 1 :] = True
    columns = columns_of(wanted_1T)
    with torch.no_grad():
        outputs = drafter.columns(
            ids_T[None].to(aux_TX.device), aux_TX[None], columns, draft_tokens
        )
        right_KN = torch.zeros(draft_tokens, columns.pos_N.numel(), dtype=torch.bool)
        for k, hidden_NH in enumerate(outputs):
            at_N = (columns.pos_N + 2 + k).cpu()
            drafts_N = drafter.target_ids(drafter.logits(hidden_NH)).cpu()
            right_KN[k] = (drafts_N == ids_T[at_N.clamp_max(length - 1)]) & (at_N < length)
    right_T = torch.zeros(length, dtype=torch.long)
    right_T[columns.pos_N.cpu()] = leading(right_KN)
    return right_T


def leading(right_KN: torch.Tensor) -> torch.Tensor:
    """[N] how many steps are right before the first wrong one: a later hit after a miss counts
    nothing (case C69)."""
    return right_KN.long().cumprod(0).sum(0)


def walk(right_T: Sequence[int], prompt_len: int, length: int) -> Steps:
    """s from P - 1; n = right drafts at s; s += n + 1; until x_{s+1} is the last token."""
    start, right, s = [], [], prompt_len - 1
    while s + 1 < length - 1:
        n = int(right_T[s])
        start.append(s)
        right.append(n)
        s += n + 1
    return Steps(start, right, length - 1)


def count(replies: Iterable[Steps], draft_tokens: int) -> AcceptanceCounts:
    """Sums over replies. A draft past a reply's end is neither offered nor accepted; tokens exclude
    the prefill's."""
    steps = tokens = 0
    accepted, offered = [0] * draft_tokens, [0] * draft_tokens
    for reply in replies:
        for s, n in zip(reply.start, reply.right, strict=True):
            room = reply.last - (s + 1)
            steps += 1
            tokens += min(n + 1, room)
            for i in range(draft_tokens):
                offered[i] += i < room
                accepted[i] += i < min(n, room)
    return AcceptanceCounts(
        steps=steps, tokens=tokens, accepted_by_position=accepted, offered_by_position=offered
    )


class Speculator:
    """Greedy decoding with drafter and target, one sequence at a time, caches cut back after each
    step."""

    def __init__(self, target: Target, drafter: Drafter, draft_tokens: int) -> None:
        self._target, self._drafter, self._draft_tokens = target, drafter, draft_tokens
        self._dtype = drafter.fc.weight.dtype

    @torch.no_grad()
    def decode(
        self, prompt: Sequence[int], max_new_tokens: int, eos: Sequence[int]
    ) -> tuple[list[int], Steps]:
        """(reply ids with the end token, its steps). Lossless: every token is the target's own
        choice."""
        stop, prompt_len = set(eos), len(prompt)
        target_cache, draft_cache = DynamicCache(), self._drafter.empty_cache()
        states, logits = self._target.step(self._ids(prompt), target_cache)
        reply = [int(logits[0, -1].argmax())]
        pending = [*list(prompt)[1:], reply[0]]
        start: list[int] = []
        right: list[int] = []
        while reply[-1] not in stop and len(reply) < max_new_tokens:
            aux_SX = states[0, :, :3].flatten(1).to(self._dtype)
            hidden_1H = self._drafter.extend(draft_cache, self._ids(pending)[0], aux_SX)
            drafts = self._drafter.propose(draft_cache, hidden_1H, self._draft_tokens)
            s = prompt_len + len(reply) - 2
            states, logits = self._target.step(self._ids([reply[-1], *drafts]), target_cache)
            best = logits[0].argmax(-1).tolist()
            n = next((i for i, d in enumerate(drafts) if d != best[i]), len(drafts))
            fresh = _until_end([*drafts[:n], best[n]], stop, max_new_tokens - len(reply))
            start.append(s)
            right.append(min(n, len(fresh)))
            reply += fresh
            if n < len(drafts):
                target_cache.crop(n - len(drafts))
            states, pending = states[:, : n + 1], [*drafts[:n], best[n]]
        return reply, Steps(start, right, prompt_len + len(reply) - 1)

    def _ids(self, ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor([list(ids)], device=self._target.device)


def _until_end(tokens: list[int], stop: set[int], room: int) -> list[int]:
    """Cut after the first end token and at `room`."""
    for i, token in enumerate(tokens[:room]):
        if token in stop:
            return tokens[: i + 1]
    return tokens[:room]


def unique_ngram_ratio(replies: Iterable[Sequence[int]], n: int = 4) -> float | None:
    """Distinct n-grams per n-gram within replies: far below 1 the text loops, and acceptance means
    little."""
    total = distinct = 0
    for ids in replies:
        grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
        total += len(grams)
        distinct += len(set(grams))
    return distinct / total if total else None
