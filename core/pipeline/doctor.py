"""Can this config run here? Every check that costs nothing, each answered in one line.

Promises: no request that is billed, nothing left behind. Knows where each part of eyas looks, not
how it works."""

import asyncio
import contextlib
import json
import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from core import gpu
from core.config import Config
from core.errors import EyasError
from core.pipeline.gateway import Gateway, needs_gateway
from core.pipeline.setting import resolve
from core.pipeline.stages import refuse_what_is_missing, selected
from core.prompts import load_prompts
from core.providers import make_provider
from core.providers.base import Advice
from core.providers.chat import declares_tools
from core.providers.http import FDS_KEPT_BACK
from core.render.kimi import VARIANTS
from core.render.source import pinned, renderer_of
from core.render.tokenizer import TokenizerLike
from core.render.tools_ts import declare
from core.schema import Prompt, Sampling
from core.store import RunDir

BYTES_PER_TOKEN = 16
"""On disk, of one generated token: the reply with its request's share (8 as a whole body, 13 as a
packed stream: tests.bench.store), its head in the index and its ids."""


class Check(msgspec.Struct, frozen=True):
    level: Literal["ok", "warn", "fail"]
    what: str
    detail: str


def examine(config: Config, base: Path) -> list[Check]:
    """All checks, in the order in which a run would meet them."""
    config = resolve(config, base)
    checks = [_tokenizer(config), *_limits(config), _devices(config)]
    prompts: list[Prompt] = []
    try:
        prompts = load_prompts(config)
        checks.append(Check("ok", "prompts", f"{len(prompts)} from {_datasets(config)}"))
        checks += _schemas(config, prompts)
        checks += _forecast(config, prompts)
    except EyasError as e:
        checks.append(Check("fail", "prompts", str(e)))
    if needs_gateway(config):
        checks.append(Check("ok", "backends", "the run starts the embedded gateway on loopback"))
        checks += asyncio.run(_embedded(config, prompts))
    else:
        checks += asyncio.run(_backends(config, prompts))
    return checks


def _tokenizer(config: Config) -> Check:
    try:
        config = pinned(config)
        tokenizer = renderer_of(config).tokenizer
    except EyasError as e:
        return Check("fail", "tokenizer", str(e))
    where = config.target.tokenizer or "embedded"
    return Check(
        "ok",
        "tokenizer",
        f"{where}: {tokenizer.vocab_size} ids, special ids as expected,"
        f" sha256 {tokenizer.sha256[:12]}",
    )


def _schemas(config: Config, prompts: list[Prompt]) -> Iterator[Check]:
    """One schema that cannot be typed switches its prompt's whole declaration to JSON, which a
    server may print with its own default fields."""
    variant = VARIANTS.get(config.target.variant)
    if variant is None or variant.tools != "typescript":
        return
    reasons: dict[str, str | None] = {}
    tooled, first, count = 0, "", 0
    for prompt in prompts:
        if not prompt.tools:
            continue
        key = json.dumps(prompt.tools)
        if key not in reasons:
            reasons[key] = declare(prompt.tools).fallback
        tooled += 1
        if reason := reasons[key]:
            count += 1
            first = first or f"{prompt.dataset} row {prompt.source_row}, {reason}"
    if count:
        yield Check(
            "warn",
            "tool schemas",
            f"{count} of {tooled} prompts with tools are declared as JSON, not as TypeScript; first"
            f" {first}; mend the schema, or expect other prompt counts from servers",
        )
    elif tooled:
        yield Check("ok", "tool schemas", f"all {tooled} declarations as TypeScript")


def _limits(config: Config) -> Iterator[Check]:
    wanted = config.generate.max_in_flight + FDS_KEPT_BACK
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = hard == resource.RLIM_INFINITY or hard >= wanted
    yield Check(
        "ok" if enough else "warn",
        "open files",
        f"{wanted} wanted, limit {soft} (raised to {hard} at start)"
        if enough
        else f"{wanted} wanted, hard limit {hard}: at most {max(1, hard - FDS_KEPT_BACK)} requests "
        "will be in flight; raise it (ulimit -Hn) for more",
    )


def _devices(config: Config) -> Check:
    try:
        refuse_what_is_missing(config, selected(config))
    except EyasError as e:
        return Check("fail", "stages", str(e))
    names = ", ".join(g.name for g in gpu.available_gpus()) or "none"
    return Check(
        "ok", "GPU", f"{names}; extract on {config.target.device}, train on {config.train.device}"
    )


def _forecast(config: Config, prompts: list[Prompt]) -> Iterator[Check]:
    """Upper bounds: every reply as long as it may be."""
    runs = Path(config.run.dir)
    existing = next(p for p in (runs, *runs.parents) if p.exists())
    need = len(prompts) * config.generate.max_tokens * BYTES_PER_TOKEN
    free = shutil.disk_usage(existing).free
    fits = free - need >= config.run.min_free_disk_bytes
    yield Check(
        "ok" if fits else "warn",
        "disk",
        f"{free / 1e9:.1f} GB free in {existing}, replies take at most {_size(need)}",
    )


def _datasets(config: Config) -> str:
    count = len(config.dataset)
    return "1 dataset" if count == 1 else f"{count} datasets"


def _size(count_bytes: int) -> str:
    return f"{count_bytes / 1e9:.1f} GB" if count_bytes >= 1e9 else f"{count_bytes / 1e6:.1f} MB"


async def _embedded(config: Config, prompts: list[Prompt]) -> list[Check]:
    """The run's own gateway, started for the moment in a folder that goes with it."""
    with tempfile.TemporaryDirectory(prefix="eyas-doctor-") as folder:
        gateway = Gateway(RunDir(Path(folder)))
        try:
            checks = await _backends(await gateway.start(config), prompts)
            return [c for c in checks if c.level != "warn"]  # nobody restarts it by hand
        except EyasError as e:
            return [Check("fail", "backends", str(e))]
        finally:
            await gateway.stop()


async def _backends(config: Config, prompts: list[Prompt]) -> list[Check]:
    names = dict.fromkeys(d.backend for d in config.dataset)
    if any(d.twins or d.arm == "local" for d in config.dataset):
        names["sglang"] = None
    checks: list[Check] = []
    for name in names:
        try:
            checks += await _preflight(config, name, [p for p in prompts if p.backend == name])
        except EyasError as e:
            checks.append(Check("fail", name, str(e).removeprefix(f"{name}: ")))
    return checks


async def _preflight(config: Config, name: str, prompts: list[Prompt]) -> list[Check]:
    tokenizer: TokenizerLike | None = None
    with contextlib.suppress(EyasError):  # which has its own line
        tokenizer = renderer_of(config).tokenizer
    provider = make_provider(name, config)
    generate = config.generate
    sampling = Sampling(
        temperature=generate.temperature, top_p=generate.top_p, max_tokens=generate.max_tokens
    )
    try:
        tools = any(map(declares_tools, prompts))
        lines = await provider.preflight(sampling, tokenizer, tools)
    finally:
        await provider.close()
    checks = [
        Check("warn" if isinstance(line, Advice) else "ok", name, line.removeprefix(f"{name}: "))
        for line in lines
    ]
    worst = [s.price.worst_usd(1, generate.max_tokens) for s in provider.lanes]
    budget = config.run.budget_usd
    if min(worst) > budget:
        said = f"run.budget_usd {budget:g} is below one worst-case request (${min(worst):.4f})"
        checks.append(Check("fail", name, f"{said}; raise it or lower generate.max_tokens"))
    elif max(worst) > 0:
        said = f"one reply costs at most ${max(worst):.4f}, those to all {len(prompts)} prompts"
        checks.append(Check("ok", name, f"{said} ${max(worst) * len(prompts):.2f}"))
    return checks
