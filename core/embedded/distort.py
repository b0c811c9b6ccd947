"""What the text faults do to a completion. Pure: sampled text in, the reply that a faulty server
would show out."""

import hashlib
import json
import re
from collections.abc import Callable

import msgspec

from core.embedded.faults import Hits
from core.embedded.replies import MARKERS, SECTION, SECTION_END, THINK_END, Mode, Parsed, parse
from core.schema import ToolCall

_MARKER = re.compile("|".join(re.escape(m) for m in MARKERS))
ID_FAULTS = ("rewritten_ids", "renumbered_ids", "dotless_ids", "shared_ids")
_STRIPS: dict[str, Callable[[str], str]] = {
    "both": str.strip,
    "left": str.lstrip,
    "right": str.rstrip,
}


def early_tools(text: str) -> str:
    """The completion as a model writes it that goes from thinking straight into a tool section."""
    head, marker, tail = text.partition(SECTION)
    return head.replace(THINK_END, "", 1) + marker + tail if marker else text


def distort(text: str, mode: Mode, finish: str | None, hits: Hits) -> Parsed:
    """The reply to `text` (markers included, no stop token) under the text faults in `hits`."""
    text = _distort_markers(text, hits)
    if "raw_calls" in hits or "section_noise" in hits:
        mode = msgspec.structs.replace(mode, calls=False)
    if "unsplit" in hits:
        mode = msgspec.structs.replace(mode, thinking=False)
    reply = parse(text, mode, finish)
    _distort_texts(reply, hits)
    reply.calls = _distort_calls(reply.calls, hits)
    return reply


def distort_text(text: str, hits: Hits) -> str:
    """The same where a server shows the text alone, unsplit."""
    head, marker, tail = _distort_markers(text, hits).partition(THINK_END)
    reply = Parsed(reasoning=head, content=tail)
    _distort_texts(reply, hits)
    return reply.reasoning + marker + reply.content


def _distort_markers(text: str, hits: Hits) -> str:
    if "early_tools" in hits:
        text = early_tools(text)
    if "spaced_markers" in hits:
        text = _MARKER.sub(r" \g<0> ", text)
    if "section_noise" in hits:
        text = text.replace(SECTION, SECTION + "\nCalling:", 1)
    return text


def _distort_texts(reply: Parsed, hits: Hits) -> None:
    if "trim_reasoning" in hits:
        reply.reasoning = _strip(reply.reasoning, hits.value("trim_reasoning", "both"))
    if "trim_content" in hits:
        reply.content = _strip(reply.content, hits.value("trim_content", "both"))
    if "answer_as_reasoning" in hits:
        reply.reasoning, reply.content = reply.reasoning + reply.content, ""
    for form in (
        "withheld_reasoning",
        "reasoning_content",
        "reasoning_details_only",
        "reasoning_disagrees",
    ):
        if form in hits:
            reply.reasoning_form = form
    if "cut_marker" in hits:
        reply.content += SECTION_END[:14]
    if "lone_surrogate" in hits:
        reply.content += "\ud83d"
    if "replacement" in hits:
        reply.content += "\ufffd"


def _distort_calls(calls: list[ToolCall], hits: Hits) -> list[ToolCall]:
    if "lost_calls" in hits:
        calls = [] if hits.value("lost_calls", "") == "all" else calls[:-1]
    out: list[ToolCall] = []
    for i, call in enumerate(calls):
        call_id, arguments = call.id, call.arguments
        if "rewritten_ids" in hits:
            digest = hashlib.blake2b(f"{i}{call_id}{arguments}".encode(), digest_size=12)
            call_id = "call_" + digest.hexdigest()
        if "renumbered_ids" in hits:
            head, _, index = call_id.rpartition(":")
            call_id = f"{head}:{int(index) + int(hits.number('renumbered_ids', 1))}"
        if "dotless_ids" in hits:
            call_id = call_id.replace(".", "").replace(":", "")
        if "shared_ids" in hits and out:
            call_id = out[0].id
        if "reserialised_args" in hits:
            arguments = _reserialise(arguments, hits.value("reserialised_args", "spaced"))
        if "string_args" in hits:
            arguments = json.dumps(arguments, ensure_ascii=False)
        if "newline_args" in hits:
            arguments = arguments.replace('"', '"\n', 1)
        out.append(ToolCall(id=call_id, name=call.name, arguments=arguments))
    return out


def _strip(text: str, side: str) -> str:
    return _STRIPS.get(side, str.strip)(text)


def _reserialise(arguments: str, form: str) -> str:
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    if form == "compact":
        return json.dumps(value, separators=(",", ":"))
    return json.dumps(value, ensure_ascii=False, sort_keys=form == "sorted")
