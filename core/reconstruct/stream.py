"""The events of one stream, merged into the body that the reply would have had without streaming.

Linear in the stream's size. Pieces of text are joined before anything is encoded: BPE of a chunk is
not a chunk of the BPE.
"""

from typing import Any, Literal

import msgspec

from core.providers.chat import count
from core.providers.classify import error_in_body, parse_json
from core.providers.sse import DONE, SseParser

_TEXTS = ("content", "reasoning", "reasoning_content")


class Merged(msgspec.Struct, kw_only=True):
    body: dict[str, Any]
    problems: list[str] = []


def merge_stream(raw: str) -> Merged:
    """`raw`: the events as received, in one string."""
    parser = SseParser()
    payloads = parser.feed(raw.encode())
    tail = parser.tail.strip()
    if tail.removeprefix(b"data:").strip() == DONE:
        payloads.append(DONE)
        tail = b""
    merger = _Merger()
    for payload in payloads:
        if payload.strip() == DONE:
            merger.done = True
        elif not merger.add(payload):
            break
    return merger.result(cut=bool(tail) and not merger.done)


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    reasoning_details: list[Any] | None = None
    tool_calls: list[Any] | None = None


class _Step(msgspec.Struct):
    delta: _Delta
    index: Literal[0] = 0
    message: None = None
    finish_reason: None = None
    native_finish_reason: None = None
    token_ids: list[int] | None = None
    response_token_ids: None = None
    prompt_token_ids: None = None
    error: None = None


class _Plain(msgspec.Struct):
    """An event that only goes on: nearly all of a stream. It names every field that `_add_any`
    reads, so that one which says more, an error above all, does not decode and goes the long way.
    Half its time."""

    choices: tuple[_Step]
    usage: None = None
    prompt_token_ids: None = None
    error: None = None
    output_ids: Literal["absent"] = "absent"


_plain = msgspec.json.Decoder(_Plain).decode


class _Merger:
    def __init__(self) -> None:
        self.done = False
        self.problems: list[str] = []
        self._top: dict[str, Any] = {}
        self._choice: dict[str, Any] = {}
        self._texts: dict[str, list[str]] = {name: [] for name in _TEXTS}
        self._details: list[Any] = []
        self._calls: list[_Call] = []
        self._call_at: dict[int, _Call] = {}
        self._ids: list[Any] = []
        self._native: dict[str, Any] | None = None
        self._native_ids: list[Any] = []
        self._native_texts: list[Any] = []

    def add(self, payload: bytes) -> bool:
        """False when nothing after it can be trusted."""
        try:
            step = _plain(payload).choices[0]
        except msgspec.DecodeError:
            return self._add_any(payload)
        self._add_delta(step.delta)
        self._ids += step.token_ids or ()
        return True

    def _add_delta(self, delta: _Delta) -> None:
        for name, text in (
            ("content", delta.content),
            ("reasoning", delta.reasoning),
            ("reasoning_content", delta.reasoning_content),
        ):
            if text:
                self._texts[name].append(text)
        if delta.reasoning_details:
            self._details += delta.reasoning_details
        for piece in delta.tool_calls or ():
            if isinstance(piece, dict):
                self._add_call(piece)

    def _add_any(self, payload: bytes) -> bool:
        try:
            event = parse_json(payload)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            self.problems.append("stream_incomplete")
            return False
        if "output_ids" in event:
            self._add_native(event)
            return True
        for name in ("usage", "prompt_token_ids"):
            if event.get(name) is not None:
                self._top[name] = event[name]
        choices = event.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        if isinstance(choice, dict) and choice.get("index", 0) == 0:
            self._add_choice(choice)
        if failure := error_in_body(event, {}, 0.0, streamed=self._has_text()):
            self.problems.append(failure.kind)
            return False
        return True

    def _has_text(self) -> bool:
        return any(self._texts.values()) or bool(self._calls) or self._native is not None

    def _add_choice(self, choice: dict[str, Any]) -> None:
        for name in ("finish_reason", "native_finish_reason", "prompt_token_ids"):
            if choice.get(name) is not None:
                self._choice[name] = choice[name]
        for name in ("token_ids", "response_token_ids"):
            if isinstance(choice.get(name), list):
                self._ids += choice[name]
        delta = choice.get("delta") or choice.get("message")
        if not isinstance(delta, dict):
            return
        for name, parts in self._texts.items():
            if isinstance(delta.get(name), str) and delta[name]:
                parts.append(delta[name])
        if isinstance(delta.get("reasoning_details"), list):
            self._details += delta["reasoning_details"]
        if isinstance(delta.get("tool_calls"), list):
            for piece in delta["tool_calls"]:
                if isinstance(piece, dict):
                    self._add_call(piece)

    def _add_call(self, piece: dict[str, Any]) -> None:
        index = piece.get("index")
        index = index if isinstance(index, int) else len(self._calls)
        given = piece.get("id") or ""
        call = self._call_at.get(index)
        # Some providers give every call index 0: a new id is a new call.
        if call is None or (given and call.id and given != call.id):
            call = _Call(index)
            self._call_at[index] = call
            self._calls.append(call)
        call.id = call.id or given
        function = piece.get("function")
        if isinstance(function, dict):
            call.name = call.name or function.get("name") or ""
            arguments = function.get("arguments")
            if isinstance(arguments, str):
                call.arguments.append(arguments)
            elif arguments is not None:
                call.object = arguments

    def _add_native(self, event: dict[str, Any]) -> None:
        """SGLang's `/generate` sends everything so far, or with incremental output what is new; how
        many there are by then tells which. An event that is missing shows in the last count."""
        ids, known, meta = event["output_ids"], self._native_ids, event.get("meta_info")
        if not isinstance(ids, list):
            self.problems.append("reply_malformed")
            return
        tokens = count(meta.get("completion_tokens")) if isinstance(meta, dict) else None
        if tokens is None and known:
            self.problems.append("reply_malformed")
        elif tokens is not None and len(ids) < tokens:
            known += ids
            self._native_texts.append(event.get("text"))
        else:
            self._native_ids, self._native_texts = ids, [event.get("text")]
        self._native = event

    def result(self, cut: bool) -> Merged:
        if self._native is not None:
            texts = self._native_texts
            joined = "".join(texts) if all(isinstance(t, str) for t in texts) else None
            body = {**self._native, "output_ids": self._native_ids, "text": joined}
            return Merged(body=body, problems=self.problems)
        message: dict[str, Any] = {name: "".join(parts) for name, parts in self._texts.items()}
        message["reasoning_details"] = self._details
        if self._calls:
            message["tool_calls"] = [call.whole() for call in self._calls]
        choice = {"finish_reason": None, **self._choice, "message": message}
        if self._ids:
            choice["token_ids"] = self._ids
        finished = choice["finish_reason"] is not None
        if cut or (not self.done and not finished and not self.problems):
            self.problems.append("stream_incomplete")
        said = self._choice or self._details or self._ids or self._has_text()
        choices = [choice] if said or not self.done else []  # ended without a word: case C30
        return Merged(body={**self._top, "choices": choices}, problems=self.problems)


class _Call:
    __slots__ = ("arguments", "id", "index", "name", "object")

    def __init__(self, index: int) -> None:
        self.index = index
        self.id: Any = ""
        self.name: Any = ""
        self.arguments: list[str] = []
        self.object: Any = None

    def whole(self) -> dict[str, Any]:
        arguments = "".join(self.arguments) if self.object is None else self.object
        function = {"name": self.name, "arguments": arguments}
        return {"id": self.id, "index": self.index, "function": function}
