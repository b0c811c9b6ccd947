"""A gateway in this process over recorded completions, and the completions that tests use."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import ClientResponse
from aiohttp.test_utils import TestClient, TestServer

from core.embedded import TARGET_DIR
from core.embedded.gateway import Gateway, arguments
from core.render.tokenizer import Tokenizer

AUTH = {"Authorization": "Bearer test"}
CHAT = "/api/v1/chat/completions"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CALL_TEXT = (
    "<|tool_call_begin|>functions.get_weather:{n}<|tool_call_argument_begin|>"
    '{{"city":"{city}"}}<|tool_call_end|>'
)
PLAIN = " Two and two.\n</think>\n\nFour. "
TWO_CALLS = (
    " Look both up.\n</think>\n\nChecking.<|tool_calls_section_begin|>"
    + CALL_TEXT.format(n=0, city="Oslo")
    + CALL_TEXT.format(n=1, city="Bergen")
    + "<|tool_calls_section_end|>"
)


def tokenizer() -> Tokenizer:
    return Tokenizer.load(TARGET_DIR)


def ids_of(text: str, stop: bool = True) -> list[int]:
    """Completion ids of a text with markers."""
    tok = tokenizer()
    return tok.encode_special(text) + ([tok.specials["<|im_end|>"]] if stop else [])


def write_replay(path: Path, texts: Sequence[str]) -> Path:
    path.write_text("".join(json.dumps({"completion_ids": ids_of(t)}) + "\n" for t in texts))
    return path


@asynccontextmanager
async def serving(
    tmp_path: Path, *texts: str, extra: Sequence[str] = (), faults: str = ""
) -> AsyncIterator[TestClient[Any, Any]]:
    """A client of a gateway that answers with `texts`."""
    path = write_replay(tmp_path / "replay.jsonl", texts or [PLAIN])
    base = ["--replay", str(path), "--latency-scale", "0", "--lookup-lag-s", "0"]
    gateway = Gateway(arguments([*base, "--faults", faults, *extra]))
    async with TestClient(TestServer(gateway.app())) as client:
        yield client
    await gateway.desk.close()
    gateway.arrivals.close()


def ask(**fields: Any) -> dict[str, Any]:
    """A request body, pinned to Alder unless `fields` says otherwise."""
    body: dict[str, Any] = {
        "model": "eyas/embedded",
        "messages": [{"role": "user", "content": "What is 2 + 2?"}],
        "max_tokens": 200,
        "seed": 1,
        "provider": {"only": ["Alder"]},
    }
    return body | fields


async def post(client: TestClient[Any, Any], **fields: Any) -> ClientResponse:
    return await client.post(CHAT, json=ask(**fields), headers=AUTH)


async def reply(client: TestClient[Any, Any], **fields: Any) -> dict[str, Any]:
    response = await post(client, **fields)
    assert response.status == 200, await response.text()
    return dict(await response.json())


async def message(client: TestClient[Any, Any], **fields: Any) -> dict[str, Any]:
    return dict((await reply(client, **fields))["choices"][0]["message"])


def sse(text: str) -> list[dict[str, Any]]:
    """Data events of a stream, comments and [DONE] left out."""
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


async def until(check: Callable[[], Awaitable[bool]]) -> None:
    """Wait for a condition, ten seconds at most."""
    async with asyncio.timeout(10):
        while True:
            if await check():
                return
            await asyncio.sleep(0.01)


async def bill(client: TestClient[Any, Any]) -> dict[str, Any]:
    return dict(await (await client.get("/gateway/bill")).json())
