"""Case C41 for its whole kind: descriptors that run out in the middle of a run."""

import asyncio
import json
import subprocess
import sys

import pytest
from aiohttp import web

from core.providers import base
from core.providers.openrouter import OpenRouter
from tests.core.generate.rig import Router, Run, prompts_of, says, serving

FEW = """
import asyncio, json, resource, sys
from tests.core.generate.rig import Router, Run, prompts_of
import core.generate.dispatch as dispatch

async def main() -> None:
    router = Router()
    router.url = sys.argv[1]
    dispatch.raise_fd_limit = lambda: 5_000  # what the limit was when the run began
    run = Run(router, prompts_of(60), max_in_flight=60, attempts_unpaid=1)
    run.generator._pump.window = 60
    held = [open("/dev/null") for _ in range(3)]
    first = max(f.fileno() for f in held)
    resource.setrlimit(resource.RLIMIT_NOFILE, (first + 30, first + 30))
    result = await run.go()
    classes = [r.error_class for r in run.rollouts]
    for file in held:
        file.close()
    print(json.dumps({"outcomes": result.outcomes, "emfile": classes.count("local_emfile"),
                      "spent": run.check_books()}))

asyncio.run(main())
"""


async def test_c41_descriptors_that_really_run_out_fail_nothing() -> None:
    """A process with thirty left, sixty requests that want one each at the same time."""

    async def slow(request: web.Request, router: Router) -> web.StreamResponse:
        await asyncio.sleep(0.2)
        return await says()(request, router)

    async with serving(Router(otherwise=slow)) as router:
        child = await asyncio.to_thread(
            subprocess.run, [sys.executable, "-c", FEW, router.url], capture_output=True, text=True
        )
    assert child.returncode == 0, child.stderr
    seen = json.loads(child.stdout)
    assert seen["outcomes"] == {"ok": 60}
    assert 0 < seen["emfile"] < 120
    assert seen["spent"] == pytest.approx(0.06)
    assert len(router.bodies) == 60


async def test_c41_a_process_without_descriptors_does_not_spin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What holds them may be another's for minutes: a try a second, not as many as the CPU can."""
    tries: list[float] = []

    async def starved(
        self: OpenRouter, request: base.CompletionRequest, flight: base.Flight
    ) -> base.Reply:
        tries.append(asyncio.get_running_loop().time())
        if len(tries) >= 20:
            run.generator.halt("test", "")
        return base.Reply(request={}, failure=base.LocalEmfile("too many open files"))

    monkeypatch.setattr(OpenRouter, "complete", starved)
    monkeypatch.setattr("core.limit.BACKOFF_FLOOR_S", 0.1)
    async with serving(Router()) as router:
        run = Run(router, prompts_of(8), max_in_flight=8)
        await run.go()
    assert len({round(t, 1) for t in tries}) > 8  # one round of eight, then one at a time
