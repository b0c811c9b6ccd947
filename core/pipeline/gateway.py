"""The embedded gateway as a child of the engine: started, waited for, and gone when the engine is.

Knows the gateway's command line and its ready file, nothing about what it serves.
"""

import asyncio
import contextlib
import json
import os
import secrets
from typing import Any

import msgspec

from core.config import Config
from core.errors import ProviderError
from core.halting import python_command
from core.store import RunDir

READY_TIMEOUT_S = 120.0
KEY_ENV = "EYAS_GATEWAY_KEY"
"""A name of its own, so that a real key in the environment never leaves for the gateway. The value
is random: secrets are cut out of stored replies, and no reply may hold this one by chance."""


def needs_gateway(config: Config) -> bool:
    """The embedded target without base URLs of its own: the run brings its gateway."""
    if config.target.kind != "embedded":
        return False
    backends = {d.backend for d in config.dataset}
    local = any(d.twins or d.arm == "local" for d in config.dataset)
    wants_openrouter = "openrouter" in backends and not config.generate.openrouter.base_url
    wants_sglang = ("sglang" in backends or local) and not config.generate.sglang.urls
    return wants_openrouter or wants_sglang


class Gateway:
    """`start` returns the config with the gateway's addresses in the places that were left
    empty."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._folder = run.path / "gateway"
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, config: Config) -> Config:
        """Raises ProviderError when it does not come up."""
        self._folder.mkdir(exist_ok=True)
        ready = self._folder / "ready.json"
        ready.unlink(missing_ok=True)
        arguments = ["--port", "0", "--ready", str(ready), "--exit-with-stdin"]
        arguments += ["--truth", str(self._folder / "truth.jsonl"), "--seed", str(config.run.seed)]
        arguments += ["--log", str(self._folder / "gateway.log")]
        if config.target.variant != "template":
            arguments += ["--variant", config.target.variant]
        self._process = await asyncio.create_subprocess_exec(
            *python_command("core", "gateway", *arguments), stdin=asyncio.subprocess.PIPE
        )
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                while not ready.exists():
                    if self._process.returncode is not None:
                        raise ProviderError(
                            "embedded gateway: ended before it was ready "
                            f"(code {self._process.returncode}); see {self._run.output_log}"
                        )
                    await asyncio.sleep(0.05)
        except TimeoutError as e:
            raise ProviderError(f"embedded gateway: not ready after {READY_TIMEOUT_S:.0f} s") from e
        return _with_addresses(config, json.loads(ready.read_bytes()))

    async def ended(self) -> int:
        """Waits for its end, whoever brought it about; the exit code."""
        assert self._process is not None, "ended: the gateway was not started"
        return await self._process.wait()

    async def stop(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        if process.stdin is not None:
            process.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(5.0):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


def _with_addresses(config: Config, ready: dict[str, Any]) -> Config:
    os.environ.setdefault(KEY_ENV, secrets.token_hex(16))
    replace = msgspec.structs.replace
    openrouter, sglang = config.generate.openrouter, config.generate.sglang
    if not openrouter.base_url:
        openrouter = replace(openrouter, base_url=ready["base_url_openrouter"], api_key_env=KEY_ENV)
    if not sglang.urls:
        sglang = replace(sglang, urls=[ready["base_url_sglang"]])
    generate = replace(config.generate, openrouter=openrouter, sglang=sglang)
    return replace(config, generate=generate)
