"""The rest of SGLang's HTTP shape: models, health, server facts, metrics, aborts and pauses."""

from typing import Any

import msgspec
from aiohttp import web

from core.embedded.openrouter_api import answer
from core.embedded.sglang_api import SGLangApi, error

SERVED_MODEL = "eyas/embedded"


class AbortBody(msgspec.Struct, kw_only=True):
    rid: str = ""
    abort_all: bool = False


class TokenizeBody(msgspec.Struct, kw_only=True):
    prompt: str = ""
    tokens: list[int] = []


class SGLangInfo:
    """`facts` are the server's arguments as /server_info reports them."""

    def __init__(self, api: SGLangApi, facts: dict[str, Any]) -> None:
        self._api = api
        self._desk = api.desk
        self._facts = facts

    async def models(self, request: web.Request) -> web.Response:
        row = {
            "id": SERVED_MODEL,
            "object": "model",
            "owned_by": "sglang",
            "root": SERVED_MODEL,
            "max_model_len": self._desk.context_length,
        }
        return answer({"object": "list", "data": [row]})

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def server_info(self, request: web.Request) -> web.Response:
        return answer(self._facts)

    async def model_info(self, request: web.Request) -> web.Response:
        kept = ("model_path", "tokenizer_path", "weight_version")
        return answer({k: self._facts[k] for k in kept} | {"is_generation": True})

    async def metrics(self, request: web.Request) -> web.Response:
        running, queued = self._desk.source.load_now()
        counts = self._desk.counts
        rows = {
            "num_running_reqs": ("gauge", running),
            "num_queue_reqs": ("gauge", queued),
            "num_requests_total": ("counter", counts["requests"]),
            "num_aborted_requests_total": ("counter", counts["aborted"]),
            "prompt_tokens_total": ("counter", counts["prompt_tokens"]),
            "generation_tokens_total": ("counter", counts["generation_tokens"]),
        }
        lines = []
        for name, (kind, value) in rows.items():
            lines.append(f"# TYPE sglang:{name} {kind}")
            lines.append(f'sglang:{name}{{model_name="{SERVED_MODEL}"}} {value}')
        return web.Response(text="\n".join(lines) + "\n", content_type="text/plain")

    async def abort(self, request: web.Request) -> web.Response:
        try:
            body = msgspec.json.decode(await request.read() or b"{}", type=AbortBody)
        except msgspec.DecodeError as e:
            return error(400, f"invalid request: {e}")
        for rid, gen in list(self._api.running.items()):
            if body.abort_all or (body.rid and rid.startswith(body.rid)):
                gen.job.cancel()
        return web.Response()

    async def pause(self, request: web.Request) -> web.Response:
        self._desk.source.pause(True)
        return answer({"status": "ok", "message": "Generation paused."})

    async def resume(self, request: web.Request) -> web.Response:
        self._desk.source.pause(False)
        return answer({"status": "ok", "message": "Generation continued."})

    async def flush_cache(self, request: web.Request) -> web.Response:
        return web.Response(text="Cache flushed.\n")

    async def tokenize(self, request: web.Request) -> web.Response:
        renderer = self._desk.renderer
        try:
            body = msgspec.json.decode(await request.read(), type=TokenizeBody)
        except msgspec.DecodeError as e:
            return error(400, f"invalid request: {e}")
        if renderer is None:
            return error(501, "no tokenizer is loaded")
        ids = renderer.tokenizer.encode_special(body.prompt)
        return answer(
            {"tokens": ids, "count": len(ids), "max_model_len": self._desk.context_length}
        )
