"""The embedded gateway: one loopback process that serves the built-in model in OpenRouter and in
SGLang shape.

OpenRouter lies under /api/v1, SGLang at the root, test-only administration under /gateway. Live
mode samples from the model; replay mode speaks recorded completions with a chosen timing and never
loads torch.
"""

import argparse
import asyncio
import os
import resource
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from core.embedded import TARGET_DIR
from core.embedded.arrivals import Arrivals
from core.embedded.books import Lines
from core.embedded.desk import Desk
from core.embedded.faults import parse_plan, plan_of
from core.embedded.jobs import Source
from core.embedded.openrouter_api import ChatApi, answer
from core.embedded.openrouter_info import InfoApi
from core.embedded.openrouter_wire import dumps
from core.embedded.replay import ReplaySource
from core.embedded.sglang_api import SGLangApi
from core.embedded.sglang_info import SGLangInfo
from core.errors import EXIT_DONE, EXIT_FAILED, EyasError, UsageError
from core.memory import rare_collections
from core.render.base import Renderer, load_renderer
from core.store import write_atomic

REPLAY_CONTEXT = 262_144
MAX_BODY_BYTES = 64 << 20
BACKLOG = 4_096


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="eyas gateway", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="0: any free port")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--ready", type=Path, help="file that says where it listens, once it does")
    parser.add_argument("--truth", type=Path, help="file of the true ids of every reply")
    parser.add_argument("--books", type=Path, help="file of all charges (beside the truth file)")
    parser.add_argument("--faults", default="", help="name[=value][:rate][@provider][#count],...")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--exit-with-stdin", action="store_true", help="end when stdin ends")
    parser.add_argument("--log", type=Path, help="one line per request")
    parser.add_argument("--model-dir", type=Path, default=TARGET_DIR)
    parser.add_argument("--variant", default="kimi-k2.5", help="chat template")
    parser.add_argument("--slots", type=int, default=64, help="sequences sampled at once")
    parser.add_argument("--threads", type=int, default=0, help="torch threads; 0: torch's choice")
    parser.add_argument("--credit", type=float, default=1_000.0, help="USD on the account")
    parser.add_argument("--latency-scale", type=float, default=1.0, help="times the providers' own")
    parser.add_argument("--lookup-lag-s", type=float, default=0.25)
    parser.add_argument("--replay", type=Path, help="file of recorded completions")
    parser.add_argument("--tokens-per-s", type=float, default=0.0, help="replay; 0: at once")
    parser.add_argument("--ttft-s", type=float, default=0.0, help="replay: time to first token")
    parser.add_argument(
        "--incremental-streaming-output",
        action="store_true",
        help="streams of /generate do not repeat themselves",
    )
    return parser.parse_args(argv)


@web.middleware
async def quiet_goodbye(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """A client that vanishes while it is written to is no defect: the handler has noted it, and
    nobody is left to be answered."""
    try:
        return await handler(request)
    except ConnectionError:
        return web.Response(status=499)


class Gateway:
    """The parts of one process. Made on the running loop."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        renderer = _renderer(options)
        source: Source
        context = REPLAY_CONTEXT
        if options.replay is not None:
            tokenizer = renderer.tokenizer if renderer else None
            source = ReplaySource.load(
                options.replay, tokenizer, options.tokens_per_s, options.ttft_s
            )
        else:
            from core.embedded.live import LiveSource

            assert renderer is not None
            live = LiveSource(options.model_dir, renderer.tokenizer, options.slots, options.threads)
            if live.vocab_size < renderer.tokenizer.vocab_size:
                raise UsageError(
                    f"{options.model_dir}: the model has {live.vocab_size} tokens and the "
                    f"tokenizer {renderer.tokenizer.vocab_size}; they belong to different models"
                )
            source, context = live, live.context_length
        self.desk = Desk(
            renderer=renderer,
            source=source,
            context_length=context,
            credit_usd=options.credit,
            seed=options.seed,
            truth=options.truth,
            books=options.books or (options.truth and options.truth.with_name("books.jsonl")),
        )
        self.desk.plan = parse_plan(options.faults, options.seed)
        self.arrivals = Arrivals(self.desk.now, Lines(options.log))

    def app(self) -> web.Application:
        options, desk = self.options, self.desk
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[quiet_goodbye])
        chat = ChatApi(desk, self.arrivals, latency_scale=options.latency_scale)
        info = InfoApi(desk, lookup_lag_s=options.lookup_lag_s)
        local = SGLangApi(desk, self.arrivals, options.incremental_streaming_output)
        facts = SGLangInfo(local, _server_facts(options, desk))
        app.add_routes(
            [
                web.post("/api/v1/chat/completions", chat.chat),
                web.get("/api/v1/generation", info.generation),
                web.get("/api/v1/credits", info.credits),
                web.get("/api/v1/key", info.key),
                web.get("/api/v1/models", info.models),
                web.get("/api/v1/models/{author}/{slug}/endpoints", info.endpoints),
                web.post("/generate", local.generate),
                web.post("/v1/chat/completions", local.chat),
                web.get("/v1/models", facts.models),
                web.get("/health", facts.health),
                web.get("/health_generate", facts.health),
                web.get("/server_info", facts.server_info),
                web.get("/get_server_info", facts.server_info),
                web.get("/model_info", facts.model_info),
                web.get("/get_model_info", facts.model_info),
                web.get("/metrics", facts.metrics),
                web.post("/abort_request", facts.abort),
                web.post("/pause_generation", facts.pause),
                web.post("/continue_generation", facts.resume),
                web.post("/flush_cache", facts.flush_cache),
                web.post("/tokenize", facts.tokenize),
                web.get("/gateway/bill", self._bill),
                web.get("/gateway/requests", self._requests),
                web.get("/gateway/faults", self._faults),
                web.post("/gateway/faults", self._set_faults),
            ]
        )
        return app

    async def _bill(self, request: web.Request) -> web.Response:
        return answer(self.desk.ledger.bill())

    async def _requests(self, request: web.Request) -> web.Response:
        return answer({"in_flight": self.arrivals.in_flight, "requests": self.arrivals.all})

    async def _faults(self, request: web.Request) -> web.Response:
        return answer(self.desk.plan.describe())

    async def _set_faults(self, request: web.Request) -> web.Response:
        """JSON as `plan_of` reads it, or the command line's form as plain text."""
        text = await request.text()
        try:
            data = msgspec.json.decode(text) if text.lstrip()[:1] in ("{", "[", '"') else text
            self.desk.plan = plan_of(data, self.desk.seed)
        except (UsageError, msgspec.DecodeError) as e:
            return web.Response(status=400, text=f"{e}\n")
        return answer(self.desk.plan.describe())


def _renderer(options: argparse.Namespace) -> Renderer | None:
    """Replay of text alone needs no tokenizer: the embedded one may be absent then."""
    if options.replay is not None and not (options.model_dir / "tiktoken.model").exists():
        return None
    return load_renderer(options.model_dir, options.variant)


def _server_facts(options: argparse.Namespace, desk: Desk) -> dict[str, Any]:
    return {
        "model_path": str(options.model_dir),
        "tokenizer_path": str(options.model_dir),
        "served_model_name": "eyas/embedded",
        "weight_version": "default",
        "context_length": desk.context_length,
        "max_running_requests": options.slots,
        "tool_call_parser": "kimi_k2",
        "reasoning_parser": "kimi_k2",
        "disable_radix_cache": True,
        "incremental_streaming_output": options.incremental_streaming_output,
        "speculative_algorithm": None,
        "enable_metrics": True,
        "random_seed": options.seed,
        "dtype": "float32",
        "device": "cpu",
        "version": "embedded",
    }


def _raise_file_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _follow_stdin(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    """A thread that waits for the end of stdin, which is the parent's end."""

    def wait() -> None:
        while os.read(0, 4_096):
            pass
        if not loop.is_closed():
            loop.call_soon_threadsafe(stop.set)

    threading.Thread(target=wait, name="stdin", daemon=True).start()


async def serve(options: argparse.Namespace) -> None:
    """Listen until SIGTERM, SIGINT or the end of stdin."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    _raise_file_limit()
    gateway = Gateway(options)
    runner = web.AppRunner(
        gateway.app(), access_log=None, handler_cancellation=True, shutdown_timeout=0.2
    )
    await runner.setup()
    site = web.TCPSite(runner, options.host, options.port, backlog=BACKLOG)
    try:
        await site.start()
    except (OSError, OverflowError) as e:
        why = e.strerror if isinstance(e, OSError) else e
        raise UsageError(
            f"{options.host}:{options.port}: cannot listen ({why}); use another --port"
        ) from e
    port = runner.addresses[0][1]
    base = f"http://{options.host}:{port}"
    if options.exit_with_stdin:
        _follow_stdin(loop, stop)
    if options.ready is not None:
        ready = {
            "port": port,
            "pid": os.getpid(),
            "base_url_openrouter": f"{base}/api/v1",
            "base_url_sglang": base,
        }
        write_atomic(options.ready, dumps(ready))
    with rare_collections():
        await stop.wait()
        await runner.cleanup()
    await gateway.desk.close()
    gateway.arrivals.close()


def main(argv: list[str]) -> int:
    """Exit code 0 after SIGTERM or the end of stdin; 1 or 2 with one line on stderr."""
    options = arguments(argv)
    try:
        asyncio.run(serve(options))
    except EyasError as e:
        sys.stderr.write(f"eyas gateway: {e}\n")
        return e.exit_code
    except OSError as e:
        sys.stderr.write(f"eyas gateway: {e.filename or ''}: {e.strerror}; cannot go on\n")
        return EXIT_FAILED
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
