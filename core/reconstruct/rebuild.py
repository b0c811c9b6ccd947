"""One reply -> completion ids with a verdict and its evidence.

`exact` needs ids from the server that agree with its text. `consistent` needs a canonical rebuild
whose length equals the billed count and nothing that would change ids. The rest says what it is.
Knows one reply and how it was asked for, nothing about prompts' ids, files or networks.
"""

from collections.abc import Sequence

import msgspec

from core.errors import TokenizerError
from core.reconstruct import checks
from core.reconstruct.classes import first_class, is_before
from core.reconstruct.completion import (
    THINK_CLOSE,
    Draft,
    Encoded,
    Item,
    Walked,
    draft_from_fields,
    draft_from_ids,
    encode,
    walk,
    walk_plain,
)
from core.reconstruct.habits import habits_of
from core.reconstruct.hypotheses import hypotheses, in_sequence, is_spaced
from core.reconstruct.reply import Reply
from core.render.base import Grammar, Renderer
from core.render.tokenizer import TokenizerLike, chunk_cuts
from core.schema import Segment, ToolCall, Verdict


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """How the reply was asked for, as far as it decides what the reply may be.

    `tools`: names declared, None when not known. `allowed`: values of billed - rebuilt that count
    as equal; `thinking_allowed` likewise of reasoning tokens, None where they mean something else.
    `lost`: habits of the model that the provider is known to take away.
    """

    thinking: bool = True
    tools: list[str] | None = None
    tool_choice: str | None = None
    """`none`, `required`, or the name of the one function to call."""
    max_tokens: int | None = None
    prior_calls: int | None = None
    """Calls earlier in the conversation, from where the model's own ids go on counting."""
    allowed: tuple[int, ...] = (0, -1)
    thinking_allowed: tuple[int, ...] | None = (0, 1)
    lost: frozenset[str] = frozenset()


class Rebuilt(msgspec.Struct, kw_only=True):
    """`rebuilt` is the length of the reply as its fields say, `ids` what fits best."""

    verdict: Verdict
    error_class: str | None = None
    hypothesis: str | None = None
    flags: list[str] = []
    ids: list[int] = []
    segments: list[Segment] = []
    calls: list[ToolCall] = []
    finish: str | None = None
    rebuilt: int | None = None
    billed: int | None = None
    reasoning_off: int | None = None
    habits: dict[str, bool] = {}


def rebuild(reply: Reply, ask: Ask, renderer: Renderer) -> Rebuilt:
    """Never raises for a bad reply."""
    main = first_class(reply.problems)
    if main is not None and is_before(main, "control_string_in_prompt"):
        return Rebuilt(verdict="rejected", error_class=main, billed=reply.usage.completion_tokens)
    if reply.ids is not None:
        return _from_ids(reply, ask, renderer)
    if renderer.grammar is None:
        return _from_plain_text(reply, ask, renderer)
    return _TextRebuild(reply, ask, renderer.grammar, renderer.tokenizer).result()


def _thinks(ask: Ask, grammar: Grammar | None) -> bool:
    return ask.thinking and grammar is not None and grammar.think_close is not None


def _from_ids(reply: Reply, ask: Ask, renderer: Renderer) -> Rebuilt:
    """Ids as sampled, stored unchanged, whether canonical or not (cases C03, C48)."""
    ids, tokenizer = reply.ids or [], renderer.tokenizer
    result = Rebuilt(verdict="rejected", finish=reply.finish, billed=reply.usage.completion_tokens)
    problems = list(reply.problems)
    try:
        if not _agrees(reply, ids, tokenizer):
            problems.append("ids_text_mismatch")
        draft = draft_from_ids(ids, tokenizer)
    except TokenizerError:
        return msgspec.structs.replace(result, error_class="token_id_unknown")
    if renderer.grammar is None:
        walked = walk_plain(draft.items, renderer.end_id)
    else:
        thinking = _thinks(ask, renderer.grammar)
        walked = walk(draft.items, thinking, renderer.grammar.prompt_opens_think)
    encoded = encode(draft.items, walked.kinds, tokenizer)
    flags = list(walked.flags)
    if reply.finish not in ("length", None) and (not ids or ids[-1] != renderer.end_id):
        flags.append("end_not_returned")
    problems += walked.problems
    if renderer.grammar is not None:
        problems += checks.ending_problems(walked, reply.finish)
        problems += checks.call_problems(walked.calls, structured=False)
        problems += checks.emptiness_problems(walked, draft.items)
        problems += _choice_problems(walked.calls, ask, reply.finish)
    elif reply.finish == "length":
        problems.append("truncated_length")
    if result.billed is not None and result.billed != len(ids):
        problems.append("count_mismatch")
    if checks.is_degenerate(ids):
        problems.append("degenerate_repetition")
    return _filled(
        result, draft.items, walked, encoded, flags + _undeclared(walked.calls, ask), problems
    )


def _filled(
    result: Rebuilt,
    items: Sequence[Item],
    walked: Walked,
    encoded: Encoded,
    flags: list[str],
    problems: list[str],
) -> Rebuilt:
    main = first_class(problems)
    return msgspec.structs.replace(
        result,
        verdict="exact" if main is None else "rejected",
        error_class=main,
        ids=encoded.ids,
        segments=encoded.segments,
        calls=walked.calls,
        flags=list(dict.fromkeys(flags)),
        rebuilt=len(encoded.ids),
        habits=habits_of(items, walked.kinds, walked.calls),
    )


def _agrees(reply: Reply, ids: list[int], tokenizer: TokenizerLike) -> bool:
    """Whether the ids decode to the text that came with them.

    A server may leave out the stop token or all skippable specials; parsed fields lose markers and
    outer whitespace, but their text must stand in what the ids say.
    """
    decoded = tokenizer.decode(ids)
    if reply.text is not None:
        if reply.text in (decoded, tokenizer.decode(ids[:-1])):
            return True
        return reply.text == tokenizer.decode([i for i in ids if i not in tokenizer.skippable])
    return reply.reasoning.strip() in decoded and reply.content.strip() in decoded


def _from_plain_text(reply: Reply, ask: Ask, renderer: Renderer) -> Rebuilt:
    """A family whose completions have no known structure: only a bare answer can be proved."""
    result = Rebuilt(
        verdict="unverifiable", finish=reply.finish, billed=reply.usage.completion_tokens
    )
    items = [Item(False, reply.content)]
    problems = list(reply.problems)
    problems += checks.text_problems(items, ["content"], renderer.tokenizer.specials)
    if reply.finish == "length":
        problems.append("truncated_length")
    if not (reply.content or reply.calls or reply.reasoning):
        problems.append("empty_completion")
    if main := first_class(problems):
        return msgspec.structs.replace(result, verdict="rejected", error_class=main)
    if reply.reasoning or reply.calls or renderer.end_id is None:
        return msgspec.structs.replace(result, flags=["no_grammar"])
    ids = [*renderer.tokenizer.encode_ordinary(reply.content), renderer.end_id]
    end = len(ids) - 1
    result.ids, result.rebuilt = ids, len(ids)
    result.segments = [
        Segment(kind="content", start=0, end=end),
        Segment(kind="end", start=end, end=end + 1),
    ]
    if result.billed is not None and ask.allowed:
        fits = result.billed - len(ids) in ask.allowed
        result.verdict = "consistent" if fits else "mismatch"
        result.error_class = None if fits else "count_mismatch"
    return result


class _TextRebuild:
    """The text path: put together, check, count, and where the count is off, try hypotheses."""

    def __init__(self, reply: Reply, ask: Ask, grammar: Grammar, tokenizer: TokenizerLike) -> None:
        self.reply, self.ask, self.grammar, self.tokenizer = reply, ask, grammar, tokenizer
        self.thinking = _thinks(ask, grammar)
        self.billed = reply.usage.completion_tokens or None

    def result(self) -> Rebuilt:
        reply = self.reply
        draft = draft_from_fields(reply, self.grammar, self.thinking)
        walked, encoded = self._encoded(draft)
        structured = bool(reply.calls) and "tool_section_in_content" not in draft.flags
        calls = reply.calls if structured else walked.calls
        problems = self._problems(draft, walked, calls, structured)
        flags = draft.flags + walked.flags + _undeclared(calls, self.ask)
        if checks.spells_a_special(draft.items, self.tokenizer.specials):
            flags.append("special_like_text")
        finish = "tool_calls" if "finish_reason_normalised" in flags else reply.finish
        found = Rebuilt(
            verdict="rejected",
            flags=list(dict.fromkeys(flags)),
            ids=encoded.ids,
            segments=encoded.segments,
            calls=calls,
            finish=finish,
            rebuilt=len(encoded.ids),
            billed=self.billed,
            reasoning_off=self._reasoning_off(encoded),
            habits=habits_of(draft.items, walked.kinds, calls),
        )
        if self._stops_at_limit():
            found.flags.append("stop_at_limit")
            problems.append("truncated_length")
        main = first_class(problems)
        if main in ("tool_section_noise", "tool_id_malformed") and self._try_despaced(found):
            return found
        if main is not None:
            found.error_class = main
            return found
        self._judge_count(found, draft, foreign=any(map(checks.is_foreign, reply.calls)))
        if found.verdict in ("consistent", "unverifiable") and checks.is_degenerate(found.ids):
            found.verdict, found.error_class = "rejected", "degenerate_repetition"
        return found

    def _encoded(self, draft: Draft) -> tuple[Walked, Encoded]:
        walked = walk(draft.items, self.thinking, self.grammar.prompt_opens_think)
        return walked, encode(draft.items, walked.kinds, self.tokenizer)

    def _problems(
        self, draft: Draft, walked: Walked, calls: list[ToolCall], structured: bool
    ) -> list[str]:
        reply = self.reply
        problems = [*reply.problems, *draft.problems, *walked.problems]
        if not self.ask.thinking and (reply.reasoning or THINK_CLOSE in reply.content):
            problems.append("thinking_mode_mismatch")
        problems += _choice_problems(calls, self.ask, reply.finish)
        problems += checks.ending_problems(walked, reply.finish)
        problems += checks.text_problems(draft.items, walked.kinds, self.tokenizer.specials)
        problems += checks.call_problems(calls, structured)
        problems += checks.emptiness_problems(walked, draft.items)
        if reply.finish == "tool_calls" and not calls:
            problems.append("tool_call_lost")
        return problems

    def _stops_at_limit(self) -> bool:
        """A provider that says `stop` at the very token limit was most likely cut there."""
        limit = self.ask.max_tokens
        return limit is not None and self.billed == limit and self.reply.finish != "length"

    def _judge_count(self, found: Rebuilt, draft: Draft, foreign: bool) -> None:
        if foreign:
            found.flags.append("tool_id_foreign")
        if self.billed is None:
            found.verdict = "unverifiable"
        elif not self.ask.allowed:
            found.verdict = "unverifiable"
            found.flags.append("mixed_stop_offset")
            self._try_despaced(found)
        elif self.billed - len(found.ids) in self.ask.allowed:
            self._judge_equal(found, draft, foreign)
        else:
            found.verdict, found.error_class = "mismatch", "count_mismatch"
            if not self._try_despaced(found):
                self._try_hypotheses(found)

    def _reasoning_off(self, encoded: Encoded) -> int | None:
        """Reported minus rebuilt reasoning tokens; None where nothing, or nothing but zero, is
        reported."""
        reported = self.reply.usage.reasoning_tokens
        if not self.thinking or not reported:
            return None
        return reported - sum(s.end - s.start for s in encoded.segments if s.kind == "reasoning")

    def _thinking_fits(self, off: int | None) -> bool:
        allowed = self.ask.thinking_allowed
        return off is None or allowed is None or off in allowed

    def _judge_equal(self, found: Rebuilt, draft: Draft, foreign: bool) -> None:
        """The count fits; what is left are reasons why the ids may differ all the same."""
        if foreign:
            found.verdict, found.error_class = "rejected", "tool_id_malformed"
            return
        if self._try_despaced(found):
            return
        found.verdict = "unverifiable"
        if any(chunk_cuts(item.text) for item in draft.items):
            # Sampled ids know no chunks; whether the canonical ones do is a guess.
            found.flags.append("long_run")
        elif self._may_lack_close(found):
            found.flags.append("think_close_unproven")
        elif "special_like_text" in found.flags and self._may_be_special(draft):
            found.flags.append("special_unproven")
        elif not self._thinking_fits(found.reasoning_off):
            self._judge_thinking(found)
        elif not in_sequence(self.reply.calls, self.ask.prior_calls):
            found.flags.append("tool_id_out_of_sequence")
            self._try_hypotheses(found, only="renumbered_id")
        elif lost := {h for h in self.ask.lost if found.habits.get(h) is False}:
            self._judge_lost(found, lost)
        else:
            found.verdict = "consistent"

    def _judge_thinking(self, found: Rebuilt) -> None:
        """The whole count fits and that of the thinking does not: text went to the wrong side of
        `</think>`, unless the provider reports something of its own."""
        found.flags.append("reasoning_count")
        learned = len(self.ask.thinking_allowed or ()) == 1
        found.verdict = "mismatch" if learned else "unverifiable"
        found.error_class = "count_mismatch" if learned else None
        self._try_hypotheses(found)

    def _judge_lost(self, found: Rebuilt, lost: set[str]) -> None:
        found.verdict = "hypothesis"
        if any(name.startswith("arguments") for name in lost):
            found.hypothesis = "compact_arguments"
            found.flags.append("provider_rewrites_arguments")
        if any(name.endswith("blank") for name in lost):
            found.hypothesis = "trimmed_space"
            found.flags.append("provider_trims_whitespace")

    def _may_lack_close(self, found: Rebuilt) -> bool:
        """One token short, calls right after the thinking, and the provider's offset not known yet:
        the stop token may be uncounted, or the model may have left out `</think>`."""
        unknown = len(self.ask.allowed) > 1 and self.billed == len(found.ids) - 1
        return unknown and self.thinking and bool(found.calls) and not self.reply.content

    def _may_be_special(self, draft: Draft) -> bool:
        """Whether the count fits as well with `[EOS]` in the text sampled as the special."""
        billed = self.billed or 0
        lengths = checks.lengths_with_specials(draft.items, self.tokenizer)
        return lengths is None or any(billed - n in self.ask.allowed for n in lengths)

    def _try_despaced(self, found: Rebuilt) -> bool:
        """The one change that the text itself suggests."""
        if not is_spaced(self.reply):
            return False
        found.flags.append("spaced_markers")
        return self._try_hypotheses(found, only="spaced_markers")

    def _try_hypotheses(self, found: Rebuilt, only: str = "") -> bool:
        if self.billed is None:
            return False
        allowed = self.ask.allowed or (0, -1)
        tried = hypotheses(self.reply, self.grammar, self.thinking, self.ask.prior_calls)
        for name, draft in tried:
            if only and name != only:
                continue
            walked, encoded = self._encoded(draft)
            if walked.problems or self.billed - len(encoded.ids) not in allowed:
                continue
            if not self._thinking_fits(self._reasoning_off(encoded)):
                continue
            found.verdict, found.hypothesis = "hypothesis", name
            found.error_class = "count_mismatch"
            found.ids, found.segments = encoded.ids, encoded.segments
            found.calls = walked.calls
            return True
        return False


def _choice_problems(calls: Sequence[ToolCall], ask: Ask, finish: str | None) -> list[str]:
    choice = ask.tool_choice
    if choice is None or choice == "auto" or finish == "length":
        return []
    if choice == "none":
        return ["tool_choice_violated"] if calls else []
    named = choice not in ("required", "any")
    if not calls or (named and any(c.name != choice for c in calls)):
        return ["tool_choice_violated"]
    return []


def _undeclared(calls: Sequence[ToolCall], ask: Ask) -> list[str]:
    if ask.tools is None or all(c.name in ask.tools for c in calls):
        return []
    return ["tool_undeclared"]
