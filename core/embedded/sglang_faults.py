"""What faults do to SGLang's shape: which of them mean something to a request, and a reply's body,
bytes and time under those of the wire. A chat has its counts under `usage`, `/generate` under
`meta_info`."""

import asyncio
from asyncio import sleep
from typing import Any

from aiohttp import web

from core.embedded.desk import Generation
from core.embedded.faults import ANSWERS, GENERATION, KINDS, MESSAGES_ONLY, Hits
from core.embedded.openrouter_api import break_connection
from core.embedded.openrouter_wire import BLANKS

COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens", "reasoning_tokens")
CHAT_STREAM = frozenset((*ANSWERS, *GENERATION, "cut_stream"))
"""What a chat's stream here shows. The last event of /generate is its whole reply and shows what
that shows, but for the faults of its bytes."""
BYTES = ("truncated_body", "blank_lines")


def idle(generate: bool, given_ids: bool, stream: bool) -> frozenset[str]:
    """The faults that would leave no trace in the reply. `given_ids`: the prompt is not rendered
    here."""
    names = set(MESSAGES_ONLY) if generate else set()
    if given_ids:
        names.add("old_template")
    if stream:
        names |= set(BYTES) if generate else KINDS.keys() - CHAT_STREAM
    return frozenset(names)


def error_body(name: str, hits: Hits, generate: bool) -> dict[str, Any]:
    """A 200 that is an error: beside an empty choice (alone in /generate), or inside the choice."""
    code = int(hits.number("error_in_200", 429)) if name == "error_in_200" else 502
    inner = {"message": "scheduler failed", "type": "InternalServerError", "code": code}
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
    """A whole reply, or the event of a stream that holds counts, under the faults in `hits`."""
    if not hits:
        return data
    data = dict(data)
    if "empty_choices" in hits:
        data["choices"] = []
        data["usage"] = data["usage"] | {"completion_tokens": 0}
    if "no_finish" in hits:
        if "choices" in data:
            data["choices"] = [c | {"finish_reason": None} for c in data["choices"]]
        else:
            data["meta_info"] = data["meta_info"] | {"finish_reason": None}
    place = "meta_info" if "meta_info" in data else "usage"
    counts = _distort_counts(data[place], hits)
    if counts:
        data[place] = counts
    else:
        del data[place]
    return data


def _distort_counts(counts: dict[str, Any], hits: Hits) -> dict[str, Any]:
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
