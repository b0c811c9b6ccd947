"""Tokenizers by hub name, against a hub of our own on loopback: what is fetched, when, and what is
said when it cannot be."""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from core.config import TARGET_DIR
from core.errors import TokenizerError
from core.render.base import load_renderer
from core.render.hub import KIMI_FILES, REVISIONS, HubName, hub_name
from core.render.source import tokenizer_dir
from tests.kimi_files import KIMI, needs_kimi

COMMIT = "c" * 40
CODE = "tokenization_kimi.py"


class Hub(http.server.ThreadingHTTPServer):
    """Files by repository; every request is written down."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.commit = COMMIT
        self.asked: list[tuple[str, str, str]] = []
        """(method, revision, file)"""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        hub = self.server
        assert isinstance(hub, Hub)
        if self.path == "/":  # whether there is a hub at all
            self.send_response(404)
            self.send_header("Content-Length", "0")
            return self.end_headers()
        owner, name, _, revision, file = self.path.lstrip("/").split("/", 4)
        hub.asked.append((self.command, revision, file))
        repo = hub.repos.get(f"{owner}/{name}")
        data = None if repo is None else repo.get(file)
        commit = hub.commit if revision == "main" else revision
        if data is None:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound" if repo is None else "EntryNotFound")
            self.send_header("X-Repo-Commit", commit)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("X-Repo-Commit", commit)
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    server.repos["acme/small"] = small()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def small(directory: Path = TARGET_DIR) -> dict[str, bytes]:
    """A Kimi repository with the code that must not be fetched."""
    files = {name: (directory / name).read_bytes() for name in KIMI_FILES[:2]}
    return {**files, "config.json": b"{}", CODE: b"raise SystemExit('executed')"}


def eyas(
    hub: Hub | None, home: Path, *arguments: str, stdin: str = "", **more: str
) -> subprocess.CompletedProcess[str]:
    """The command line with its own hub cache; `hub` None: no network."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    environment |= {"HF_HOME": str(home), "HF_ENDPOINT": hub.url if hub else "http://127.0.0.1:9"}
    environment |= more
    return subprocess.run(
        [sys.executable, "-m", "core", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
    )


ASK = json.dumps({"id": 1, "text": "Hello <|im_end|>"})
ENCODE = ("tokens", "encode", "--tokenizer")


def test_names() -> None:
    assert hub_name("acme/small") == HubName("acme/small", "main")
    assert hub_name("acme/small@v1.0/x") == HubName("acme/small", "v1.0/x")
    name = "moonshotai/Kimi-K2.5"
    assert hub_name(name) == HubName(name, REVISIONS[name])
    assert hub_name(f"{name}@main") == HubName(name, "main")
    for path in ("", "small", "/acme/small", "./acme/small", "../acme", "a/b/c", "~/a", "a/b@"):
        assert hub_name(path) is None


def test_downloaded_only_when_asked_and_then_never_again(hub: Hub, tmp_path: Path) -> None:
    refused = eyas(hub, tmp_path, *ENCODE, "acme/small", stdin=ASK)
    assert (refused.returncode, refused.stdout, hub.asked) == (2, "", [])
    assert refused.stderr.count("\n") == 1
    assert "acme/small: no such directory" in refused.stderr and "--download" in refused.stderr

    fetched = eyas(hub, tmp_path, *ENCODE, "acme/small", "--download", stdin=ASK)
    assert (fetched.returncode, fetched.stderr) == (0, "")
    assert {file for _, _, file in hub.asked} == set(KIMI_FILES)
    later = {(revision, file) for _, revision, file in hub.asked if file != "tiktoken.model"}
    assert later == {(COMMIT, file) for file in KIMI_FILES[1:]}
    assert not list(tmp_path.rglob(CODE))

    embedded = eyas(None, tmp_path, "tokens", "encode", stdin=ASK)
    again = eyas(None, tmp_path, *ENCODE, "acme/small", stdin=ASK)
    assert again.stdout == fetched.stdout == embedded.stdout
    assert json.loads(again.stdout)["ids"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("acme/none", "RepositoryNotFoundError"),
        ("acme/weights", "tiktoken.model could not be fetched (RemoteEntryNotFoundError"),
    ],
)
def test_what_the_hub_has_not(hub: Hub, tmp_path: Path, name: str, reason: str) -> None:
    hub.repos["acme/weights"] = {"config.json": b"{}"}
    done = eyas(hub, tmp_path, *ENCODE, name, "--download", stdin=ASK)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"eyas: {name}@main: ")
    assert "could not be fetched" in done.stderr


def test_no_network_is_one_line(tmp_path: Path) -> None:
    done = eyas(None, tmp_path, *ENCODE, "acme/small", "--download", stdin=ASK)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "acme/small@main: the hub http://127.0.0.1:9 cannot be reached" in done.stderr
    assert "refused" in done.stderr


def test_passwords_and_signatures_of_addresses_are_not_shown(tmp_path: Path) -> None:
    mirror = "http://me:hush@127.0.0.1:9?signature=hush"
    words = (*ENCODE, "acme/small", "--download")
    done = eyas(None, tmp_path, *words, stdin=ASK, HF_ENDPOINT=mirror)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "http://127.0.0.1:9 cannot be reached" in done.stderr and "hush" not in done.stderr


def test_offline_mode_is_obeyed(hub: Hub, tmp_path: Path) -> None:
    done = eyas(hub, tmp_path, *ENCODE, "acme/small", "--download", stdin=ASK, HF_HUB_OFFLINE="1")
    assert (done.returncode, done.stderr.count("\n"), hub.asked) == (2, 1, [])
    assert "HF_HUB_OFFLINE" in done.stderr


def test_another_vocabulary_under_kimi_s_name_is_refused(hub: Hub, tmp_path: Path) -> None:
    hub.repos["moonshotai/Kimi-K2.5"] = small()
    ask = (*ENCODE, "moonshotai/Kimi-K2.5")
    for network, words in ((hub, (*ask, "--download")), (None, ask)):  # fetched, then found
        done = eyas(network, tmp_path, *words, stdin=ASK)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert "tiktoken.model has sha256" in done.stderr and "b6c497a7469b" in done.stderr


@needs_kimi
def test_kimi_by_name_is_kimi_by_directory(hub: Hub, tmp_path: Path) -> None:
    name = "moonshotai/Kimi-K2.5"
    hub.repos[name] = small(KIMI)
    fetched = eyas(hub, tmp_path, *ENCODE, name, "--download", stdin=ASK)
    assert json.loads(fetched.stdout)["ids"][0] == 19180
    assert {revision for _, revision, _ in hub.asked} == {REVISIONS[name]}


def test_doctor_and_run_pin_the_commit(hub: Hub, tmp_path: Path) -> None:
    """`main` becomes the commit that it was, in the run's own config and manifest."""
    config = tmp_path / "run.toml"
    config.write_text(
        '[run]\nstages = ["generate"]\n[target]\ntokenizer = "acme/small"\n'
        '[[dataset]]\nname = "talk"\nkind = "embedded"\nlimit = 2\n'
        '[generate]\ncanary = 0\nmax_tokens = 8\n[generate.openrouter]\nbase_url = ""\n'
        'model = "eyas/embedded"\n'
    )
    before = eyas(hub, tmp_path, "doctor", str(config))
    line = next(x for x in before.stdout.split("\n") if "tokenizer" in x)
    assert line.startswith("fail") and "--download" in line and hub.asked == []

    refused = eyas(hub, tmp_path, "run", str(config), "--plain")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert not list((tmp_path / "runs").glob("*"))

    checked = eyas(hub, tmp_path, "doctor", str(config), "--download")
    line = next(x for x in checked.stdout.split("\n") if "tokenizer" in x)
    assert line.startswith("ok") and f"acme/small@{COMMIT}" in line

    hub.commit = "d" * 40  # the branch moves on; what is in the cache stays
    done = eyas(None, tmp_path, "run", str(config), "--plain")
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").glob("*")
    manifest = json.loads((run / "run.json").read_text())
    assert manifest["tokenizer"] == f"acme/small@{COMMIT}"
    model, tokenizer_config = ((TARGET_DIR / name).read_bytes() for name in KIMI_FILES[:2])
    assert manifest["tokenizer_files"] == {
        "tiktoken.model": hashlib.sha256(model).hexdigest(),
        "tokenizer_config.json": hashlib.sha256(tokenizer_config).hexdigest(),
    }
    assert f'tokenizer = "acme/small@{COMMIT}"' in (run / "config.toml").read_text()


@pytest.mark.parametrize("name", ["a" * 5_000, "a" * 5_000 + "/b", "a\0b", "a\0/b"])
def test_a_name_that_no_file_system_takes_is_one_line(name: str) -> None:
    with pytest.raises(TokenizerError) as caught:
        load_renderer(tokenizer_dir(name), "kimi-k2.5")
    assert "\n" not in str(caught.value)
