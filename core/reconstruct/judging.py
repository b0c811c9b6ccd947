"""Rollout + Prompt -> Sample: prompt ids as rendered or as sent, completion ids from the reply.

Never raises for a bad reply or a prompt that should not have been sent: the Sample says `rejected`
and its class. Reads learned offsets, does not change them.
"""

from collections.abc import Mapping
from typing import Any

from core.errors import RenderError
from core.reconstruct.classes import first_class
from core.reconstruct.offsets import StopOffsets
from core.reconstruct.rebuild import Ask, Rebuilt, rebuild
from core.reconstruct.reply import Reply, read_reply
from core.render.base import RenderedPrompt, Renderer, tools_as_text
from core.schema import Message, Prompt, Rollout, Sample, Usage, reply_text

PROMPT_TOLERANCE = 3
"""A vendor may add up to three tokens to a prompt (Kimi-Vendor-Verifier's rule)."""


def judge(
    rollout: Rollout,
    prompt: Prompt,
    renderer: Renderer,
    offsets: StopOffsets,
    rendered_ids: list[int] | None = None,
) -> Sample:
    """Pure. `rendered_ids`: the prompt's ids where it was rendered and found fit to be sent before;
    else it is rendered here. `rollout.usage` wins over the reply's own usage: it may hold a look-up
    (case C36)."""
    reply = read_reply(rollout.reply_kind, reply_text(rollout), rollout.status, rollout.headers)
    if rollout.reply_kind == "none" and rollout.error_class:
        reply.problems = [rollout.error_class]
    reply.usage = _merged(rollout.usage, reply.usage)
    sent = _int_list(rollout.request.get("input_ids")) or rendered_ids
    rendered: RenderedPrompt | None = None
    if sent is None:
        try:
            messages, tools = prompt.messages, prompt.tools
            if prompt.arm == "text":
                messages, tools = tools_as_text(messages, tools), None
            rendered = renderer.render(messages, tools, prompt.thinking, prompt.preserve_thinking)
        except RenderError as refusal:
            reply.problems.append(refusal.kind)
        else:
            if rendered.control_strings and reply.ids is None:
                reply.problems.append("control_string_in_prompt")
    prompt_ids = sent or (rendered.ids if rendered else [])
    if prompt_ids and not _same_prompt(reply, prompt_ids):
        reply.problems.append("prompt_ids_differ")
    provider = rollout.provider or rollout.backend
    ask = ask_of(
        rollout.request,
        messages=prompt.messages,
        thinking=prompt.thinking,
        allowed=offsets.allowed(provider),
        thinking_allowed=offsets.thinking(provider),
        lost=frozenset(offsets.lost.get(provider, ())),
    )
    rebuilt = rebuild(reply, ask, renderer)
    _check_prompt_count(rebuilt, reply.usage.prompt_tokens, len(prompt_ids))
    return _sample(rollout, rebuilt, prompt_ids, reply.usage)


def ask_of(
    request: Mapping[str, Any],
    messages: list[Message] | None,
    thinking: bool,
    allowed: tuple[int, ...] = (0, -1),
    thinking_allowed: tuple[int, ...] | None = (0, 1),
    lost: frozenset[str] = frozenset(),
) -> Ask:
    """What a recorded request body says about the reply that it may get. `messages` None: the
    conversation is not known."""
    tools = request.get("tools")
    names = request.get("tools_declared")
    if isinstance(tools, list):
        functions = [t.get("function") for t in tools if isinstance(t, dict)]
        names = [f.get("name") for f in functions if isinstance(f, dict)]
    limit = request.get("max_tokens")
    if limit is None and isinstance(request.get("sampling_params"), dict):
        limit = request["sampling_params"].get("max_new_tokens")
    return Ask(
        thinking=thinking,
        tools=[n for n in names if isinstance(n, str)] if isinstance(names, list) else None,
        tool_choice=_tool_choice(request.get("tool_choice")),
        max_tokens=limit if type(limit) is int else None,
        prior_calls=None if messages is None else _calls_in(messages),
        allowed=allowed,
        thinking_allowed=thinking_allowed,
        lost=lost,
    )


def _tool_choice(choice: Any) -> str | None:
    if isinstance(choice, dict):
        function = choice.get("function")
        choice = function.get("name") if isinstance(function, dict) else None
    return choice if isinstance(choice, str) else None


def _calls_in(messages: list[Message]) -> int:
    lists = [m.get("tool_calls") for m in messages if isinstance(m, dict)]
    return sum(len(calls) for calls in lists if isinstance(calls, list))


def _merged(known: Usage, told: Usage) -> Usage:
    def pick(a: int | None, b: int | None) -> int | None:
        return b if a is None else a

    return Usage(
        prompt_tokens=pick(known.prompt_tokens, told.prompt_tokens),
        completion_tokens=pick(known.completion_tokens, told.completion_tokens),
        reasoning_tokens=pick(known.reasoning_tokens, told.reasoning_tokens),
        cost_usd=known.cost_usd,
    )


def _int_list(value: Any) -> list[int] | None:
    if isinstance(value, list) and value and all(type(i) is int for i in value):
        return value
    return None


def _same_prompt(reply: Reply, ours: list[int]) -> bool:
    """With server ids, the server's prompt must be ours to the token."""
    if reply.ids is None:
        return True
    if reply.prompt_ids is not None:
        return reply.prompt_ids == ours
    return reply.usage.prompt_tokens in (None, len(ours))


def _check_prompt_count(rebuilt: Rebuilt, billed: int | None, ours: int) -> None:
    """Another length means another template: the ids are not what the model saw."""
    if billed is None or not ours or 0 <= billed - ours <= PROMPT_TOLERANCE:
        return
    rebuilt.flags.append("prompt_count_drift")
    if rebuilt.verdict in ("consistent", "hypothesis"):
        rebuilt.verdict = "mismatch"
        problems = filter(None, [rebuilt.error_class, "prompt_count_mismatch"])
        rebuilt.error_class = first_class(problems)


def _sample(rollout: Rollout, rebuilt: Rebuilt, prompt_ids: list[int], usage: Usage) -> Sample:
    return Sample(
        sample_id=rollout.prompt_id,
        prompt_id=rollout.prompt_id,
        twin_id=rollout.twin_id,
        dataset=rollout.dataset,
        arm=rollout.arm,
        backend=rollout.backend,
        provider=rollout.provider,
        token_ids=prompt_ids + rebuilt.ids,
        prompt_len=len(prompt_ids),
        verdict=rebuilt.verdict,
        error_class=rebuilt.error_class,
        hypothesis=rebuilt.hypothesis,
        flags=rebuilt.flags,
        calls=rebuilt.calls,
        segments=rebuilt.segments,
        finish_reason=rebuilt.finish,
        rebuilt_tokens=rebuilt.rebuilt,
        billed_tokens=rebuilt.billed,
        prompt_tokens_billed=usage.prompt_tokens,
        cost_usd=usage.cost_usd,
        reasoning_off=rebuilt.reasoning_off,
        habits=rebuilt.habits,
    )
