"""From sampled ids to what a server shows: text, then reasoning, content and tool calls. Streaming
and whole agree.

Works on text as real servers do, so a marker that the model spells in ordinary tokens splits like a
real one. Follows SGLang's `kimi_k2` parsers (spec: reasoning ends at the first `</think>` or at a
tool section; content ends at the section; text after a section, unknown ids and unfinished calls
vanish). Knows no HTTP.
"""

import codecs
import re
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from core.schema import ToolCall

THINK, THINK_END = "<think>", "</think>"
SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENT, CALL_END = (
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
MARKERS = (THINK, THINK_END, SECTION, SECTION_END, CALL, ARGUMENT, CALL_END)
"""Not flagged `special` in the tokenizer's config, so they survive `skip_special_tokens`."""
STOPS = ("<|im_end|>", "[EOS]")

_CALL = re.compile(
    re.escape(CALL)
    + r"\s*([^\s<|]+)\s*"
    + re.escape(ARGUMENT)
    + r"\s*(\{.*?\})\s*"
    + re.escape(CALL_END),
    re.DOTALL,
)
_CALL_ID = re.compile(r"(?:functions\.)?([\w.\-]+):\d+")


class Mode(msgspec.Struct, frozen=True, kw_only=True):
    """How a server reads a completion: was it asked to think, and does it parse tool calls."""

    thinking: bool = True
    calls: bool = False


class Delta:
    """One piece of a reply. `wire` keeps its encoded form per API shape, so that replayed pieces
    are encoded once."""

    __slots__ = ("call", "index", "kind", "text", "wire")

    def __init__(
        self, kind: str, text: str = "", call: ToolCall | None = None, index: int = 0
    ) -> None:
        self.kind = kind
        self.text = text
        self.call = call
        self.index = index
        self.wire: dict[str, bytes] = {}


class Parsed(msgspec.Struct, kw_only=True):
    """A whole reply. `reasoning_form` says which fields carry the reasoning (see distort)."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = []
    finish: str | None = "stop"
    reasoning_form: str = "reasoning"

    @property
    def finish_reason(self) -> str | None:
        """As the APIs name it."""
        return "tool_calls" if self.finish == "stop" and self.calls else self.finish

    def deltas(self, chars: int = 12) -> Iterable[Delta]:
        """The same reply as stream pieces of about `chars` characters."""
        for kind, text in (("reasoning", self.reasoning), ("content", self.content)):
            for start in range(0, len(text), chars):
                yield Delta(kind, text[start : start + chars])
        for i, call in enumerate(self.calls):
            yield Delta("call", call=call, index=i)


class Vocabulary(Protocol):
    """What is needed of a tokenizer."""

    @property
    def specials(self) -> dict[str, int]: ...
    def token_bytes(self, token_id: int) -> bytes: ...


def stop_ids(tokenizer: Vocabulary) -> frozenset[int]:
    return frozenset(tokenizer.specials[name] for name in STOPS if name in tokenizer.specials)


class TextStream:
    """Ids in, text out; bytes of an unfinished character wait. Stop and control tokens give no
    text."""

    def __init__(self, tokenizer: Vocabulary) -> None:
        self._tokenizer = tokenizer
        self._names = {i: name for name, i in tokenizer.specials.items()}
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, ids: Sequence[int], final: bool = False) -> str:
        parts: list[str] = []
        for i in ids:
            name = self._names.get(i)
            if name is None:
                parts.append(self._decoder.decode(self._tokenizer.token_bytes(i)))
                continue
            parts.append(self._decoder.decode(b"", final=True))
            self._decoder.reset()
            if name in MARKERS:
                parts.append(name)
        if final:
            parts.append(self._decoder.decode(b"", final=True))
        return "".join(parts)


def text_of(tokenizer: Vocabulary, ids: Sequence[int]) -> str:
    """Completion text with markers, without stop tokens."""
    return TextStream(tokenizer).feed(ids, final=True)


class Splitter:
    """Text pieces in, deltas out. What could be the beginning of a marker is held back."""

    def __init__(self, mode: Mode) -> None:
        self._mode = mode
        self._state = "reasoning" if mode.thinking else "content"
        self._held = ""
        self._calls = 0
        self._fresh = True

    def feed(self, text: str) -> list[Delta]:
        self._held += text
        out: list[Delta] = []
        while self._step(out):
            pass
        return out

    def end(self) -> list[Delta]:
        out = self.feed("")
        if self._state in ("reasoning", "content") and self._held:
            out.append(Delta(self._state, self._held))
        self._held = ""
        return out

    def _step(self, out: list[Delta]) -> bool:
        """Consume up to one marker; True when the state has changed and there may be more."""
        if self._state == "reasoning":
            if self._fresh and self._strip_think():
                return False
            return self._run(out, "reasoning", (THINK_END, SECTION))
        if self._state == "content":
            return self._run(out, "content", (SECTION,) if self._mode.calls else ())
        if self._state == "section":
            return self._section(out)
        self._held = ""
        return False

    def _strip_think(self) -> bool:
        """The opening tag belongs to the prompt: a repeated one is dropped. True while it may
        still be coming."""
        if len(self._held) < len(THINK) and THINK.startswith(self._held):
            return True
        self._held = self._held.removeprefix(THINK)
        self._fresh = False
        return False

    def _run(self, out: list[Delta], kind: str, markers: tuple[str, ...]) -> bool:
        found = [(at, m) for m in markers if (at := self._held.find(m)) >= 0]
        if not found:
            keep = max((_overlap(self._held, m) for m in markers), default=0)
            ready = self._held[: len(self._held) - keep]
            self._held = self._held[len(ready) :]
            if ready:
                out.append(Delta(kind, ready))
            return False
        at, marker = min(found)
        if at:
            out.append(Delta(kind, self._held[:at]))
        if marker == SECTION and not self._mode.calls:
            self._held = self._held[at:]
            self._state = "content"
            return True
        self._held = self._held[at + len(marker) :]
        self._state = "section" if marker == SECTION else "content"
        return True

    def _section(self, out: list[Delta]) -> bool:
        end = self._held.find(SECTION_END)
        stretch = self._held if end < 0 else self._held[:end]
        used = 0
        for match in _CALL.finditer(stretch):
            used = match.end()
            if name := _CALL_ID.fullmatch(match[1]):
                call = ToolCall(id=match[1], name=name[1], arguments=match[2])
                out.append(Delta("call", call=call, index=self._calls))
                self._calls += 1
        self._held = self._held[used:] if end < 0 else ""
        if end >= 0:
            self._state = "after"
        return False


def _overlap(text: str, marker: str) -> int:
    """Length of the longest proper prefix of `marker` that ends `text`."""
    for n in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:n]):
            return n
    return 0


def collect(deltas: Iterable[Delta], finish: str | None = "stop") -> Parsed:
    reasoning: list[str] = []
    content: list[str] = []
    calls: list[ToolCall] = []
    for delta in deltas:
        if delta.call is not None:
            calls.append(delta.call)
        else:
            (reasoning if delta.kind == "reasoning" else content).append(delta.text)
    return Parsed(
        reasoning="".join(reasoning), content="".join(content), calls=calls, finish=finish
    )


def parse(text: str, mode: Mode, finish: str | None = "stop") -> Parsed:
    splitter = Splitter(mode)
    return collect([*splitter.feed(text), *splitter.end()], finish)


def reasoning_length(ids: Sequence[int], think_end: int, section: int) -> int:
    """Ids before the end of reasoning (`</think>` not counted); all of them when it never ended."""
    for n, i in enumerate(ids):
        if i in (think_end, section):
            return n
    return len(ids)
