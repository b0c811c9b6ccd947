"""The gateway as a process: ready file, ends, books across lives, no torch in replay mode."""

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from core.embedded.gateway import main
from tests.core.embedded.serving import PLAIN, ask, write_replay

COMMAND = [sys.executable, "-m", "core.embedded.gateway"]


@contextmanager
def process(tmp_path: Path, *extra: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A running gateway and its base URL."""
    ready = tmp_path / "ready.json"
    ready.unlink(missing_ok=True)
    replay = write_replay(tmp_path / "replay.jsonl", [PLAIN])
    options = ["--replay", str(replay), "--ready", str(ready), "--exit-with-stdin", *extra]
    with subprocess.Popen([*COMMAND, *options], stdin=subprocess.PIPE) as child:
        try:
            deadline = time.monotonic() + 60
            while not ready.exists():
                assert child.poll() is None and time.monotonic() < deadline
                time.sleep(0.02)
            said = json.loads(ready.read_text())
            assert said["pid"] == child.pid
            assert said["base_url_openrouter"] == said["base_url_sglang"] + "/api/v1"
            assert said["base_url_sglang"].endswith(f":{said['port']}")
            yield child, said["base_url_sglang"]
        finally:
            child.kill()


def fetch(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": "Bearer x", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, data, headers)) as response:
        return json.load(response)


def test_the_end_of_stdin_ends_it(tmp_path: Path) -> None:
    with process(tmp_path) as (child, _):
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(20) == 0


def test_books_and_truth_outlive_it(tmp_path: Path) -> None:
    truth = tmp_path / "truth.jsonl"
    extra = ["--truth", str(truth), "--log", str(tmp_path / "log"), "--lookup-lag-s", "0"]
    with process(tmp_path, *extra) as (child, base):
        first = fetch(f"{base}/api/v1/chat/completions", ask())
        child.send_signal(signal.SIGTERM)
        assert child.wait(20) == 0
    log = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [(row["generation_id"], row["status"]) for row in log] == [(first["id"], 200)]
    with process(tmp_path, *extra) as (child, base):
        second = fetch(f"{base}/api/v1/chat/completions", ask())
        data = fetch(f"{base}/api/v1/generation?id={first['id']}")["data"]
        assert data["total_cost"] == first["usage"]["cost"]
        bill = fetch(f"{base}/gateway/bill")
        assert [g["id"] for g in bill["generations"]] == [first["id"], second["id"]]
    ids = [json.loads(line)["generation_id"] for line in truth.read_text().splitlines()]
    assert ids == [first["id"], second["id"]]


def test_a_stop_closes_what_is_open(tmp_path: Path) -> None:
    extra = ["--truth", str(tmp_path / "truth.jsonl"), "--tokens-per-s", "50"]
    with process(tmp_path, *extra, "--ttft-s", "60") as (child, base):
        host, port = base.removeprefix("http://").split(":")
        data = json.dumps(ask()).encode()
        with socket.create_connection((host, int(port))) as raw:
            raw.sendall(
                b"POST /api/v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer x\r\n"
                + f"Content-Length: {len(data)}\r\n\r\n".encode()
                + data
            )
            head = raw.recv(4_096)
            assert b"X-Generation-Id: gen-" in head
            child.send_signal(signal.SIGTERM)
            assert child.wait(20) == 0
    books = (tmp_path / "books.jsonl").read_text().splitlines()
    last = json.loads(books[-1])
    assert (last["cost_pico"], last["cancelled"]) == (0, True)
    assert last["id"].encode() in head


def test_replay_never_loads_torch(tmp_path: Path) -> None:
    script = (
        "import sys, asyncio\n"
        "from core.embedded.gateway import Gateway, arguments\n"
        "async def go():\n"
        "    g = Gateway(arguments(['--replay', sys.argv[1]])); g.app(); await g.desk.close()\n"
        "asyncio.run(go())\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules), 'heavy import'\n"
    )
    replay = write_replay(tmp_path / "r.jsonl", [PLAIN])
    subprocess.run([sys.executable, "-c", script, str(replay)], check=True, timeout=60)


def test_a_port_in_use_is_one_line(tmp_path: Path, capfd: Any) -> None:
    replay = write_replay(tmp_path / "r.jsonl", [PLAIN])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["--replay", str(replay), "--port", port]) == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert f"127.0.0.1:{port}: cannot listen" in said


def test_bad_options_are_one_line(tmp_path: Path, capfd: Any) -> None:
    replay = str(write_replay(tmp_path / "r.jsonl", [PLAIN]))
    assert main(["--replay", str(tmp_path / "none")]) == 2
    assert main(["--replay", replay, "--port", "99999"]) == 2
    assert main(["--replay", replay, "--faults", "nonsense"]) == 2
    assert main(["--replay", replay, "--truth", str(tmp_path / "no" / "where")]) == 2
    assert main(["--model-dir", str(tmp_path)]) == 2
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 5
    assert all(line.startswith("eyas gateway: ") for line in lines)
