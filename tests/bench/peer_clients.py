"""Peers under the same load: the OpenAI SDK, litellm, bespokelabs-curator. Each in a process of its
own, under the interpreter that EYAS_SDK_PYTHON (or EYAS_CURATOR_PYTHON) names; eyas depends on none
of them.

Their defaults, but: no retries, long timeouts, and no limit of connections below the width."""

import asyncio
import importlib
import os
import tempfile
from typing import Any

from tests.bench import meter

TIMEOUT_S = 600.0


async def openai_sdk(options: Any) -> dict[str, float]:
    import openai
    from openai._base_client import AsyncHttpxClientWrapper

    try:
        import httpx2 as httpx  # from 3.0 on
    except ImportError:
        import httpx

    transport = AsyncHttpxClientWrapper(
        base_url=options.url,
        timeout=TIMEOUT_S,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
    )
    clock = meter.Meter(options.requests, options.in_flight)
    async with openai.AsyncOpenAI(
        base_url=options.url, api_key="bench", max_retries=0, http_client=transport
    ) as client:

        async def one(number: int) -> None:
            body = meter.body_of(number, options.stream)
            provider = {"provider": body.pop("provider")}
            reply = await client.chat.completions.create(**body, extra_body=provider)
            if options.stream:
                async for _ in reply:
                    pass
            else:
                assert reply.choices[0].message.content

        await clock.many(options.in_flight, one)
    return clock.result()


async def litellm(options: Any) -> dict[str, float]:
    import litellm

    litellm.suppress_debug_info = True
    litellm.telemetry = False
    clock = meter.Meter(options.requests, options.in_flight)

    async def one(number: int) -> None:
        body = meter.body_of(number, options.stream)
        reply = await litellm.acompletion(
            model=f"openai/{body.pop('model')}",
            extra_body={"provider": body.pop("provider")},
            base_url=options.url,
            api_key="bench",
            max_retries=0,
            timeout=TIMEOUT_S,
            **body,
        )
        if options.stream:
            async for _ in reply:
                pass
        else:
            assert reply.choices[0].message.content

    await clock.many(options.in_flight, one)
    return clock.result()


def curator(options: Any) -> dict[str, float]:
    """The whole call from prompts to a data set: its requests have no end that can be seen from
    outside."""
    # Points tiktoken at the vocabulary that litellm brings: curator would download it.
    importlib.import_module("litellm.litellm_core_utils.default_encoding")
    from bespokelabs import curator as curator_

    with tempfile.TemporaryDirectory() as folder:
        llm = curator_.LLM(
            model_name="moonshotai/kimi-k2.5",
            backend="openai",
            generation_params={"max_tokens": meter.MAX_TOKENS},
            backend_params={
                "base_url": options.url,
                "api_key": "bench",
                "max_concurrent_requests": options.in_flight,
                "max_requests_per_minute": 10_000_000,
                "max_tokens_per_minute": 10_000_000_000,
                "max_retries": 0,
                "require_all_responses": True,
                "request_timeout": int(TIMEOUT_S),
            },
        )
        texts = [meter.body_of(i, False)["messages"][0]["content"] for i in range(options.requests)]
        clock = meter.Meter(options.requests, options.in_flight)
        clock.start()
        answers = llm(texts, working_dir=folder)
        rows = answers.dataset if hasattr(answers, "dataset") else answers
        row = clock.result()
        assert len(rows) == options.requests, len(rows)
        return row


def main() -> None:
    options = meter.options()
    if options.client == "curator":
        os.environ |= {"CURATOR_DISABLE_RICH_DISPLAY": "1", "TELEMETRY_ENABLED": "false"}
        meter.report(curator(options))
        return
    work = {"openai": openai_sdk, "litellm": litellm}[options.client]
    meter.report(asyncio.run(work(options)))


if __name__ == "__main__":
    main()
