"""What faults do to SGLang's shape: which of them mean something to a request, and a reply's body,
bytes and time under those of the wire. A chat has its counts under `usage`, `/generate` under
`meta_info`."""

import asyncio
from asyncio import sleep
from typing import Any

from aiohttp import web

from core.embedded.desk import Generation
from core.embedded.faults import MESSAGES_ONLY, Hits
from core.embedded.openrouter_api import COMMENT_EVERY_S, break_connection
from core.embedded.openrouter_wire import BLANKS, DONE, dumps

COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens", "reasoning_tokens")
STREAMS_ONLY = ("error_mid_stream", "no_done", "silent_stream")
BREAKING = ("error_mid_stream", "silent_stream", "cut_stream", "truncated_body")
"""After these a stream shows some pieces and no end."""
COMMENT = b": keep-alive\n\n"


def idle(generate: bool, given_ids: bool, stream: bool) -> frozenset[str]:
    """The faults that would leave no trace in the reply. `given_ids`: the prompt is not rendered
    here."""
    names = set(MESSAGES_ONLY) if generate else set()
    if given_ids:
        names.add("old_template")
    if not stream:
        names.update(STREAMS_ONLY)
    return frozenset(names)


def _error(code: float) -> dict[str, Any]:
    return {"message": "scheduler failed", "type": "InternalServerError", "code": int(code)}


def error_body(name: str, hits: Hits, generate: bool) -> dict[str, Any]:
    """A 200 that is an error: beside an empty choice (alone in /generate), or inside the choice."""
    inner = _error(hits.number("error_in_200", 429) if name == "error_in_200" else 502)
    if generate:
        return {"error": inner}
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": None},
        "finish_reason": "stop",
    }
    if name == "choice_error":
        return {"choices": [choice | {"finish_reason": "error", "error": inner}]}
    return {"error": inner, "choices": [choice]}


def distort_body(data: dict[str, Any], hits: Hits) -> dict[str, Any]:
    """A whole reply, or an event of a stream's end, under the faults in `hits`."""
    if not hits:
        return data
    data = dict(data)
    if "empty_choices" in hits:
        data["choices"] = []
        if "usage" in data:
            data["usage"] = data["usage"] | {"completion_tokens": 0}
    if "no_finish" in hits:
        if "choices" in data:
            data["choices"] = [c | {"finish_reason": None} for c in data["choices"]]
        else:
            data["meta_info"] = data["meta_info"] | {"finish_reason": None}
    place = "meta_info" if "meta_info" in data else "usage"
    if counts := _distort_counts(data.get(place, {}), hits):
        data[place] = counts
    else:
        data.pop(place, None)
    return data


def _distort_counts(counts: dict[str, Any], hits: Hits) -> dict[str, Any]:
    if not counts:
        return counts
    if "no_usage" in hits:
        return {k: v for k, v in counts.items() if k not in (*COUNTS, "prompt_tokens_details")}
    if "zero_usage" in hits:
        return counts | {k: 0 for k in COUNTS if k in counts}
    more = int(hits.number("wrong_usage", 1)) if "wrong_usage" in hits else 0
    drift = int(hits.number("wrong_prompt_usage", 20)) if "wrong_prompt_usage" in hits else 0
    prompt = counts["prompt_tokens"] + drift
    completion = max(0, counts["completion_tokens"] + more)
    counts = counts | {"prompt_tokens": prompt, "completion_tokens": completion}
    return counts | {"total_tokens": prompt + completion} if "total_tokens" in counts else counts


async def end_badly(request: web.Request, response: web.StreamResponse, hits: Hits) -> None:
    """What follows the first pieces of a stream under a fault of BREAKING."""
    if "error_mid_stream" in hits:
        event = {"error": _error(hits.number("error_mid_stream", 502))}
        await response.write_eof(b"data: " + dumps(event) + b"\n\n" + DONE)
    elif "silent_stream" in hits:
        while True:
            await response.write(COMMENT)
            await sleep(hits.number("silent_stream", COMMENT_EVERY_S))
    elif "cut_stream" in hits or hits.value("truncated_body", "") == "hard":
        break_connection(request)


async def linger(gen: Generation, begun: float) -> None:
    """A slow server: what has taken since `begun` takes so many times as long."""
    if "slow" in gen.hits:
        taken_s = asyncio.get_running_loop().time() - begun
        await sleep(taken_s * max(0.0, gen.hits.number("slow", 10) - 1))


async def sent(request: web.Request, data: bytes, hits: Hits) -> web.StreamResponse:
    """A whole reply on its way, under the faults of its bytes."""
    if "blank_lines" in hits:
        data = BLANKS + data
    if "truncated_body" in hits:
        data = data[: len(data) * 2 // 3]
    if hits.value("truncated_body", "") != "hard":
        return web.Response(body=data, content_type="application/json")
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    await response.write(data)
    break_connection(request)
    return response
