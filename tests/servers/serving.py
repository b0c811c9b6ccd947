"""Starts a real server from its own environment, waits until it answers, and ends its whole process
group."""

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
BESIDE = CHECKOUT.parent
TOOLS = BESIDE / "shared" / "tools"
SGLANG_LAUNCHER = TOOLS / "sglang_cpu_launch.py"
KIMI_CODE = Path(os.environ.get("EYAS_KIMI_CODE") or BESIDE / "envs" / "kimi-code")
"""The checkpoint's own tokenizer code and chat template: tokenization_kimi.py,
tool_declaration_ts.py, chat_template.jinja. Never part of the repository."""
START_S = 420.0


def python_of(name: str) -> Path:
    """The interpreter of the environment `name`; EYAS_SGLANG_PYTHON, EYAS_VLLM_PYTHON name
    another."""
    given = os.environ.get(f"EYAS_{name.upper()}_PYTHON")
    return Path(given) if given else BESIDE / "envs" / name / "bin" / "python"


def needs(name: str) -> pytest.MarkDecorator:
    python = python_of(name)
    missing = not python.exists() or (name == "sglang" and not SGLANG_LAUNCHER.exists())
    return pytest.mark.skipif(
        missing,
        reason=f"no {name} environment at {python} (EYAS_{name.upper()}_PYTHON names another) or no"
        " ../shared/tools; see its servers.md",
    )


def missing_kimi_code() -> list[str]:
    wanted = ("tokenization_kimi.py", "tool_declaration_ts.py", "chat_template.jinja")
    return [name for name in wanted if not (KIMI_CODE / name).exists()]


needs_kimi_code = pytest.mark.skipif(
    bool(missing_kimi_code()),
    reason=f"{KIMI_CODE} lacks {missing_kimi_code()}: the checkpoint's own code (EYAS_KIMI_CODE)",
)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextlib.contextmanager
def served(
    command: Sequence[str | Path], port: int, log: Path, health: str = "/health"
) -> Iterator[str]:
    """The base URL of a running server. Raises RuntimeError with the log's end when it dies."""
    env = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "SGLANG_USE_CPU_ENGINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
    }
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [str(part) for part in command],
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=env,
            start_new_session=True,
        )
    try:
        _wait(process, url + health, log)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        if process.poll() is not None:
            tail = log.read_bytes()[-3000:].decode("utf-8", "replace")
            raise RuntimeError(f"the server ended with {process.returncode}\n{tail}")
        try:
            with urllib.request.urlopen(url, timeout=5) as reply:
                if reply.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(1.0)
    raise RuntimeError(f"{url} does not answer after {START_S:.0f} s; see {log}")


def sglang(model: Path, port: int, *more: str) -> list[str | Path]:
    """SGLang's server on a CPU, as servers.md starts it."""
    return [
        python_of("sglang"),
        SGLANG_LAUNCHER,
        *("--model-path", str(model), "--device", "cpu", "--attention-backend", "torch_native"),
        *("--dtype", "float32", "--max-running-requests", "8"),
        "--cuda-graph-backend-decode=disabled",
        "--cuda-graph-backend-prefill=disabled",
        "--skip-server-warmup",
        "--sleep-on-idle",
        "--enable-metrics",
        *("--host", "127.0.0.1", "--port", str(port)),
        *more,
    ]


def vllm(model: Path, port: int, name: str, *more: str) -> list[str | Path]:
    """vLLM's server on a CPU, as servers.md starts it."""
    return [
        python_of("vllm"),
        *("-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--served-model-name", name, "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "8"),
        "--enforce-eager",
        *more,
    ]
