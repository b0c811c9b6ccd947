"""The exchange itself: what is followed, and how much of an answer is read."""

from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from core.errors import ProviderError
from core.providers import base, http


@pytest.fixture
async def client() -> AsyncIterator[http.HttpClient]:

    async def moved(_: web.Request) -> web.Response:
        raise web.HTTPFound("/elsewhere")

    async def large(_: web.Request) -> web.Response:
        return web.Response(body=b" " * 300_000)

    app = web.Application()
    app.router.add_get("/moved", moved)
    app.router.add_get("/large", large)
    async with TestServer(app) as server:
        made = http.HttpClient(str(server.make_url("")), {}, 5.0)
        yield made
        await made.close()


async def test_a_redirection_is_not_followed(client: http.HttpClient) -> None:
    assert await client.get("/moved") == (302, None)


async def test_an_answer_without_end_is_read_no_further(
    client: http.HttpClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await client.text("/large") == (200, " " * 300_000)
    monkeypatch.setattr(http, "MAX_CONTROL_BYTES", 100_000)
    with pytest.raises(ProviderError, match="/large: an answer of more than 100000 bytes"):
        await client.get("/large")


async def test_a_server_without_tls_is_said_so(client: http.HttpClient) -> None:
    secure = http.HttpClient(client.base_url.replace("http:", "https:"), {}, 5.0)
    try:
        with pytest.raises(ProviderError, match=r"/x: no answer \(no TLS: [A-Z_ ]+\); is"):
            await secure.get("/x")
    finally:
        await secure.close()


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("http://127.0.0.1:9", "connection refused"),
        ("http://host.invalid", "no address is known for this host"),
    ],
)
async def test_a_host_that_is_not_reached_is_said_plainly(address: str, words: str) -> None:
    client = http.HttpClient(address, {}, 5.0)
    try:
        with pytest.raises(ProviderError) as caught:
            await client.get("/x")
        flight = base.Flight()
        failure = await client.exchange("/x", {}, flight)
    finally:
        await client.close()
    asked = "is the server up and the URL right?"
    assert str(caught.value) == f"{address}/x: no answer ({words}); {asked}"
    assert isinstance(failure, base.ConnectFailed) and str(failure) == words
