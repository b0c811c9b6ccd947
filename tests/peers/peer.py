"""Where the peers live, and how they are asked: one process, one answer a row."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.kimi_files import KIMI

VARIABLE = "EYAS_PEERS_PYTHON"
CHECKOUT = Path(__file__).resolve().parents[2]
DEFAULT = CHECKOUT.parent / "envs" / "peers" / "bin" / "python"
WORKER = Path(__file__).with_name("worker.py")
INSTALL = (
    "make a virtual environment of its own: pip install --no-deps llm-router-utils xgrammar "
    "renderers;"
    " pip install openai==2.6.1 orjson partial_json_parser msgspec tiktoken transformers==5.19.0"
    " jinja2 numpy openai-harmony prime-pydantic-config"
)


def peer_python() -> Path:
    return Path(os.environ.get(VARIABLE) or DEFAULT)


needs_peers = pytest.mark.skipif(
    not peer_python().exists(),
    reason=f"no peers' environment at {peer_python()} ({VARIABLE} names another); {INSTALL}",
)


def ask_peers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Answers in the order of the rows; `{"error"}` where a peer raised."""
    done = subprocess.run(
        [str(peer_python()), str(WORKER), str(KIMI)],
        input="".join(json.dumps(row) + "\n" for row in rows),
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    if done.returncode or len(answers) != len(rows):
        raise RuntimeError(
            f"{WORKER.name}: {len(answers)} answers to {len(rows)} rows\n{done.stderr[-2000:]}"
        )
    return answers
