"""Ground truth mode: a run against the embedded gateway in SGLang's shape, audited."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from core import config
from core import events as ev
from core.audit.record import load_audit
from core.pipeline import auditing
from core.schema import Prompt
from core.store import RunDir, encode_line, write_samples
from tests.core.embedded.serving import CALL_TEXT, PLAIN, TOOLS, TWO_CALLS, ids_of, serving
from tests.core.generate import rig

ASKED = ["plain", "calls", "high", "blanks", "split"]


def spoken() -> dict[str, list[int]]:
    """What the model samples, by prompt."""
    high = CALL_TEXT.format(n=7, city="Oslo")
    blanks = CALL_TEXT.format(n=0, city="Oslo").replace('{"city', ' {"city')
    section = " Hm.</think><|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
    return {
        "plain": ids_of(PLAIN),
        "calls": ids_of(TWO_CALLS),
        "high": ids_of(section.format(high)),
        "blanks": ids_of(section.format(blanks)),
        "split": ids_of(" So.</think>Four t", stop=False) + ids_of("wo more."),
    }


def prompts() -> list[Prompt]:
    return [
        Prompt(
            prompt_id=name,
            twin_id=f"t-{name}",
            dataset="d",
            arm="local",
            backend="sglang",
            messages=[{"role": "user", "content": f"Please do: {name}"}],
            tools=TOOLS,
        )
        for name in ASKED
    ]


async def made(tmp_path: Path, endpoint: str) -> tuple[RunDir, config.Config]:
    """A run directory as the stages before the audit leave it."""
    said, asked = spoken(), prompts()
    recorded = tmp_path / "recorded.jsonl"
    lines = [
        {
            "completion_ids": said[p.prompt_id],
            "prompt_ids": rig.renderer().render(p.messages, p.tools, p.thinking).ids,
        }
        for p in asked
    ]
    recorded.write_text("".join(json.dumps(line) + "\n" for line in lines))
    async with serving(tmp_path, extra=["--replay", str(recorded)]) as client:
        url = str(client.make_url("")).rstrip("/")
        server: Any = SimpleNamespace(url=url)
        sglang = {"urls": [url], "endpoint": endpoint}
        run = rig.Run(server, asked, rig.really_judges(), sglang=sglang, max_tokens=128)
        await run.go()
    folder = RunDir(tmp_path / "r")
    folder.path.mkdir()
    folder.prompts.write_bytes(b"".join(encode_line(p) for p in asked))
    folder.completions.write_bytes(b"".join(encode_line(r) for r in run.rollouts))
    write_samples(folder, run.samples)
    by_id = {s.prompt_id: s for s in run.samples}
    assert {by_id[name].verdict for name in ASKED} == {"exact"}
    assert all(by_id[name].completion_ids == said[name] for name in ASKED)
    return folder, run.config


@pytest.mark.parametrize("endpoint", ["chat", "generate"])
async def test_ground_truth(tmp_path: Path, endpoint: str) -> None:
    folder, settings = await made(tmp_path, endpoint)
    events: list[ev.Event] = []
    summary = auditing.run(folder, settings, events.append, lambda: False)
    found = load_audit(folder).exactness
    kinds = {kind: (c.exact, c.segments) for kind, c in found.kinds.items()}
    assert found.samples == 5 and kinds["structure"] == (5, 5)
    assert kinds["reasoning"] == (5, 5)
    assert kinds["content"] == (2, 3)  # another split of `two`: no text can tell
    assert found.kinds["content"].canonical == 2
    if endpoint == "chat":
        # SGLang's shape numbers every call anew and trims blanks round arguments.
        assert (found.with_text, found.exact) == (5, 2)
        assert (kinds["call_id"], kinds["arguments"]) == ((3, 4), (3, 4))
        assert found.kinds["call_id"].canonical == 4 and found.kinds["call_id"].same_text == 3
        assert found.false >= 1  # the renumbered call has the right count
    else:
        assert (found.with_text, found.exact, found.false) == (0, 4, 0)
        assert (kinds["call_id"], kinds["arguments"]) == ((4, 4), (4, 4))
        assert found.kinds["call_id"].compared == 0
    assert found.low < found.exact / 5 < found.high
    assert summary["rebuilt_exactly"] == found.exact / 5
    told = next(e for e in events if isinstance(e, ev.Audit)).exactness
    assert told["rate"] == found.exact / 5 and told["edges"]["exact"] == kinds["edges"][0]


def test_replies_of_apis_are_not_looked_at(tmp_path: Path) -> None:
    """Nothing to measure: completions.jsonl is not even opened."""
    folder = RunDir(tmp_path / "none")
    asked: Any = {"p": SimpleNamespace(backend="openrouter")}
    assert list(auditing.pairs(folder, asked, rig.renderer())) == []
