"""What a renderer is: messages and tools in, the prompt's text and ids out, or a refusal.

A renderer knows one model family's chat template and nothing about networks. Its ids are built by
structure: special tokens by number, every piece of text encoded as ordinary text.
"""

from pathlib import Path
from typing import Protocol

import msgspec

from core.errors import RenderError, UsageError
from core.render.tokenizer import TokenizerLike
from core.render.tools_ts import ToolsMode, declare
from core.schema import Message, Tool


class RenderedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt up to and including the generation prompt.

    `tools_mode` is None without tools; `fallback` names the schema that forced JSON.
    `control_strings`: special tokens spelled in the text. The ids hold them as text, but a server
    that renders the messages itself may not (case C53): refuse them on backends that take messages.
    """

    text: str
    ids: list[int]
    tools_mode: ToolsMode | None = None
    fallback: str | None = None
    control_strings: list[str] = []


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """Ids that give a completion its structure.

    `think_close` None: the family does not think. `prompt_opens_think`: a thinking prompt already
    ends with `<think>`, so that a completion never starts with it.
    """

    end: int
    think_open: int | None
    think_close: int | None
    section_begin: int
    section_end: int
    call_begin: int
    arguments_begin: int
    call_end: int
    prompt_opens_think: bool


class Renderer(Protocol):
    """One chat template. `grammar` is None where the structure of completions is not known."""

    @property
    def tokenizer(self) -> TokenizerLike: ...
    @property
    def variant(self) -> str: ...
    @property
    def grammar(self) -> Grammar | None: ...
    @property
    def end_id(self) -> int | None: ...
    @property
    def preserves_thinking(self) -> bool:
        """Whether the template knows `preserve_thinking`."""
        ...

    def render(
        self,
        messages: list[Message],
        tools: list[Tool] | None,
        thinking: bool,
        preserve_thinking: bool = False,
    ) -> RenderedPrompt:
        """`preserve_thinking`: the thinking of answered turns stays. Raises RenderError whose
        `kind` is the refusal class."""
        ...


def refuse_preserving(renderer: Renderer) -> RenderError:
    return RenderError(
        f"preserve_thinking: the template of {renderer.variant} does not know it",
        kind="preserve_thinking_unknown",
    )


def load_renderer(tokenizer_dir: Path, variant: str) -> Renderer:
    """The renderer of a variant over a tokenizer directory; raises TokenizerError or UsageError."""
    from core.render.kimi import VARIANTS, KimiRenderer
    from core.render.template import TemplateRenderer

    if variant == "template":
        return TemplateRenderer.load(tokenizer_dir)
    if variant not in VARIANTS:
        known = ", ".join([*VARIANTS, "template"])
        raise UsageError(f"variant {variant!r}: not known; use one of {known}")
    return KimiRenderer.load(tokenizer_dir, VARIANTS[variant])


def tools_as_text(messages: list[Message], tools: list[Tool] | None) -> list[Message]:
    """The `text` arm: the declaration that the template would print, in the system message.
    Messages that have it already are returned as they are."""
    if not tools:
        return messages
    block = declare(tools).text
    first = messages[0] if messages else {}
    content = first.get("content")
    if first.get("role") == "system" and isinstance(content, str):
        if content.startswith(block):
            return messages
        return [{**first, "content": f"{block}\n{content}"}, *messages[1:]]
    return [{"role": "system", "content": block}, *messages]
