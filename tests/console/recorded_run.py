"""The recording on disk: a run directory with a journal and samples, no engine, and a small
tokenizer.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from core import events as ev
from core.config import Config, dump
from core.schema import Sample, Segment
from core.store import RunDir, write_samples
from tests.console.recording import BASE_TS, HOSTILE, PROMPTS, RUN_ID, events


class Encoder(Protocol):
    """The part of a tokenizer that is needed to write samples."""

    def encode_special(self, text: str) -> list[int]: ...


def sample_pairs(tokenizer: "Encoder") -> Iterator[Sample]:
    """A local sample, its API twin that differs in three places, and a hostile one."""
    encode = tokenizer.encode_special
    prompt = (
        "<|im_user|>user<|im_middle|>Weather in Ulm and Bonn?<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><think>"
    )
    call = (
        "<|tool_call_begin|>functions.weather:{n}"
        "<|tool_call_argument_begin|>{args}<|tool_call_end|>"
    )
    head = "Two cities, two calls.</think>{gap}Let me look.<|tool_calls_section_begin|>"
    calls = call.format(n=0, args='{"city": "Ulm"}') + call.format(n=1, args='{"city": "Bonn"}')
    tail = "<|tool_calls_section_end|><|im_end|>"
    texts = {
        ("local", "local", "exact"): head.format(gap="\n\n") + calls + tail,
        ("declared", "kestrel", "mismatch"): head.format(gap="\n")
        + calls.replace(": ", ":")
        + tail,
        ("declared", "merlin", "rejected"): "done</think>"
        + HOSTILE.replace("\x9b", "\u009b")
        + "<|im_end|>",
    }
    prompt_ids = list(encode(prompt))
    for n, ((arm, provider, verdict), text) in enumerate(texts.items()):
        ids = list(encode(text))
        yield Sample(
            sample_id=f"{n:04x}aa55",
            prompt_id=f"{n:04x}aa55",
            twin_id="t0" if n < 2 else "t1",
            dataset="tools",
            arm=arm,
            backend="sglang" if arm == "local" else "openrouter",
            provider=provider,
            token_ids=prompt_ids + ids,
            prompt_len=len(prompt_ids),
            verdict=verdict,
            error_class="unknown_marker" if verdict == "rejected" else None,
            flags=["gap_changed"] if verdict == "mismatch" else [],
            segments=[Segment(kind="reasoning", start=0, end=5)],
            finish_reason="tool_calls",
            rebuilt_tokens=len(ids),
            billed_tokens=len(ids) + (2 if verdict == "mismatch" else 0),
            cost_usd=0.0031,
        )


def write_run(folder: Path, upto: str = "done", tokenizer: "Encoder | None" = None) -> RunDir:
    """The recording as a run directory (no engine)."""
    run = RunDir(folder / RUN_ID)
    run.journal.mkdir(parents=True)
    run.state.mkdir()
    run.samples.mkdir()
    run.config_toml.write_text(dump(Config()), encoding="utf-8")
    manifest = {
        "v": 1,
        "run_id": RUN_ID,
        "argv": ["eyas", "demo"],
        "host": "rec",
        "boot_id": "none",
        "created_at": BASE_TS,
        "started_at": BASE_TS,
        "lives": 1,
    }
    run.manifest.write_text(json.dumps(manifest), encoding="utf-8")
    recorded = events(upto)
    (run.journal / "000001.jsonl").write_bytes(b"".join(ev.encode(e) + b"\n" for e in recorded))
    state = next((e.state for e in reversed(recorded) if isinstance(e, ev.StateChanged)), "running")
    numbers = next((e for e in reversed(recorded) if isinstance(e, ev.Stats)), ev.Stats())
    status = {
        "v": 1,
        "run_id": RUN_ID,
        "state": state,
        "seq": recorded[-1].seq,
        "ts": recorded[-1].ts,
        "started_at": BASE_TS,
        "prompts": PROMPTS,
        "done": numbers.done,
        "ok": numbers.ok,
        "spent_usd": numbers.spent_usd,
        "budget_usd": 10.0,
    }
    run.status.write_text(json.dumps(status), encoding="utf-8")
    if tokenizer is not None:
        write_samples(run, sample_pairs(tokenizer))
    return run


class Letters:
    """A tokenizer for pictures: words, single bytes and Kimi's marker names, the same for ever."""

    words = (
        " two",
        "Two",
        " cities",
        " calls",
        "Let",
        " me",
        " look",
        "functions",
        ".weather",
        "city",
        "\n\n",
        "Ulm",
        "Bonn",
        ' "',
    )
    markers = (
        "<|im_end|>",
        "<|im_user|>",
        "<|im_assistant|>",
        "<|im_middle|>",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<think>",
        "</think>",
    )
    vocab_size = 256 + len(words) + len(markers)

    def encode_special(self, text: str) -> list[int]:
        pieces = (*self.words, *self.markers)
        longest_first = sorted(range(len(pieces)), key=lambda i: -len(pieces[i]))
        ids: list[int] = []
        while text:
            found = next((i for i in longest_first if text.startswith(pieces[i])), None)
            if found is None:
                ids.extend(text[0].encode("utf-8", "surrogatepass"))
                text = text[1:]
            else:
                ids.append(256 + found)
                text = text[len(pieces[found]) :]
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < 256:
            return bytes([token_id])
        return (*self.words, *self.markers)[token_id - 256].encode()

    def is_special(self, token_id: int) -> bool:
        return token_id >= 256 + len(self.words)
