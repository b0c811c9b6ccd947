"""Prompt -> what is sent: our rendering, the messages of the arm, the seed, or the reason why it
must not be sent.

Pure; called in a worker thread because rendering costs milliseconds. Knows renderers, nothing about
backends' wire formats."""

import hashlib
import json

import msgspec

from core.config import Config
from core.errors import RenderError
from core.render.base import Renderer, tools_as_text
from core.render.history import native_history
from core.schema import Prompt, Rollout, Sampling

SHARED = 1_024
"""Tokens that prompts must have in common for a provider to cache them: OpenAI's and
Anthropic's caches take no less, and a shorter beginning is not worth a wait."""


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """`prompt` holds the messages as sent. `refusal`: the class of a prompt that must not be sent,
    else empty."""

    prompt: Prompt
    ids: list[int] = []
    refusal: str = ""
    detail: str = ""
    session: str = ""
    beginning: int = 0
    """Equal for prompts whose first SHARED tokens are; 0: it has fewer."""


def seed_of(run_seed: int, twin_id: str) -> int:
    """One seed for a question, whatever the arm: twins sample alike on servers that honour
    seeds."""
    digest = hashlib.sha256(f"{run_seed}/{twin_id}".encode()).digest()
    return int.from_bytes(digest[:4], "big") & 0x7FFF_FFFF


def sampling_of(config: Config, twin_id: str) -> Sampling:
    generate = config.generate
    return Sampling(
        temperature=generate.temperature,
        top_p=generate.top_p,
        max_tokens=generate.max_tokens,
        seed=seed_of(config.run.seed, twin_id),
    )


def prefix_key(prompt: Prompt) -> str:
    """Equal for prompts whose rendering begins alike (tools and system message): they share a
    prompt cache."""
    first = prompt.messages[0] if prompt.messages else {}
    system = first.get("content") if first.get("role") == "system" else None
    text = json.dumps([prompt.tools, system], sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:16]


def refused(prompt: Prompt, attempt: int, error_class: str, why: str, final: bool) -> Rollout:
    """The end of a prompt that is not sent."""
    return Rollout(
        prompt_id=prompt.prompt_id,
        twin_id=prompt.twin_id,
        dataset=prompt.dataset,
        arm=prompt.arm,
        attempt=attempt,
        outcome="refused",
        error_class=error_class,
        error=why,
        final=final,
        backend=prompt.backend,
    )


def prepare(
    prompt: Prompt, renderer: Renderer, sends_messages: bool, room: int | None = None
) -> Prepared:
    """Render one prompt. `sends_messages`: the backend renders the messages itself, so that a
    marker spelled in the text might become a real one there (case C53). `room`: most tokens of a
    prompt that any of its providers holds beside the longest answer."""
    session = prefix_key(prompt)
    try:
        messages = native_history(prompt.messages)
        tools = prompt.tools
        if prompt.arm == "text":
            messages, tools = tools_as_text(messages, tools), None
        rendered = renderer.render(messages, tools, prompt.thinking, prompt.preserve_thinking)
    except RenderError as error:
        return Prepared(prompt=prompt, refusal=error.kind, detail=str(error), session=session)
    if sends_messages and rendered.control_strings:
        return Prepared(
            prompt=prompt,
            refusal="control_string_in_prompt",
            detail=f"the text spells {rendered.control_strings[0]!r}; ask it through /generate",
            session=session,
        )
    sent = msgspec.structs.replace(prompt, messages=messages)
    refusal = detail = ""
    if room is not None and len(rendered.ids) > room:
        refusal = "prompt_too_long"
        detail = (
            f"{len(rendered.ids)} prompt tokens, generate.max_tokens leaves {max(0, room)} in the "
            "longest context; lower it"
        )
    ids = rendered.ids
    return Prepared(
        prompt=sent,
        ids=ids,
        session=session,
        beginning=hash(tuple(ids[:SHARED])) if len(ids) >= SHARED else 0,
        refusal=refusal,
        detail=detail,
    )
