"""Samples of a run for the probe: listing, opening one with its twin, and the run's own tokenizer.
Runs in threads.

Reads samples/*.parquet when the reconstruct stage has written it; before that only what the events
said is known, and a reply is shown as it was received.
"""

import contextlib
import mmap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from core.config import Config
from core.errors import EyasError, StoreError
from core.events import Outcome
from core.schema import Rollout, Sample, Segment, ToolCall
from core.store import RunDir, read_at, read_samples

if TYPE_CHECKING:
    from core.render.tokenizer import Tokenizer

LISTED = [
    "prompt_id",
    "twin_id",
    "dataset",
    "arm",
    "backend",
    "provider",
    "verdict",
    "error_class",
    "hypothesis",
    "flags",
    "finish_reason",
    "rebuilt_tokens",
    "billed_tokens",
    "prompt_tokens_billed",
    "cost_usd",
    "dropped",
]
RAW_CHARS = 40_000


class Row(NamedTuple):
    """A line of the list. `sample` lacks the ids until it is opened."""

    sample_id: str
    prompt_id: str
    twin_id: str
    dataset: str
    arm: str
    provider: str
    verdict: str
    error_class: str
    tokens: int | None
    billed: int | None
    cost_usd: float | None
    sample: Sample | None


class Opened(NamedTuple):
    """What the detail screen shows. `raw` stands in when there are no ids yet."""

    row: Row
    sample: Sample | None
    twin: Sample | None
    tokenizer: "Tokenizer | None"
    raw: str
    note: str


def rows_of(run: RunDir, outcomes: Sequence[Outcome]) -> list[Row]:
    """All samples on disk; before the reconstruct stage, the newest outcomes."""
    rows = [
        Row(
            s.sample_id,
            s.prompt_id,
            s.twin_id,
            s.dataset,
            s.arm,
            s.provider or s.backend,
            s.verdict,
            s.error_class or s.hypothesis or "",
            s.rebuilt_tokens,
            s.billed_tokens,
            s.cost_usd,
            s,
        )
        for s in read_samples(run, LISTED)
    ]
    known = {row.prompt_id for row in rows}
    for o in reversed(outcomes):
        if o.prompt_id in known or o.outcome == "aborted":
            continue
        known.add(o.prompt_id)
        rows.append(
            Row(
                o.sample_id or o.prompt_id,
                o.prompt_id,
                "",
                o.dataset,
                o.arm,
                o.provider or o.backend,
                o.verdict or o.outcome,
                o.error_class or "",
                o.completion_tokens,
                o.completion_tokens,
                o.cost_usd,
                None,
            )
        )
    return rows


def open_sample(run: RunDir, row: Row, rows: Sequence[Row], against: str = "") -> Opened:
    """The sample with ids, its twin (same question, local arm; for a local sample the first other
    arm), tokenizer.
    """
    tokenizer, note = _tokenizer(run)
    if row.sample is None:
        raw = _raw_reply(run, row.prompt_id)
        return Opened(
            row,
            None,
            None,
            tokenizer,
            raw,
            note or "ids and verdict come with the reconstruct stage",
        )
    twin_row = find_twin(row, rows, against)
    wanted = [r for r in (row, twin_row) if r is not None and r.sample is not None]
    full = _with_ids(run, wanted)
    twin = full.get(twin_row.sample_id) if twin_row is not None else None
    return Opened(row, full.get(row.sample_id), twin, tokenizer, "", note)


def find_twin(row: Row, rows: Sequence[Row], against: str = "") -> Row | None:
    """By id when asked, else the same question through the local arm."""
    if against:
        return next((r for r in rows if r.sample_id.startswith(against)), None)
    if not row.twin_id:
        return None
    others = [r for r in rows if r.twin_id == row.twin_id and r.sample_id != row.sample_id]
    if row.arm == "local":
        return next((r for r in others if r.arm != "local"), None)
    return next((r for r in others if r.arm == "local"), None)


def find_row(rows: Sequence[Row], name: str) -> Row:
    """A sample by id or the unique beginning of one. Raises StoreError."""
    found = [r for r in rows if r.sample_id == name] or [
        r for r in rows if r.sample_id.startswith(name)
    ]
    if len(found) != 1:
        what = (
            f"{len(found)} samples of this run begin" if found else "no sample of this run begins"
        )
        raise StoreError(f"{name}: {what} like this; `eyas probe RUN` lists them")
    return found[0]


def _tokenizer(run: RunDir) -> tuple["Tokenizer | None", str]:
    from core.render.source import tokenizer_dir
    from core.render.tokenizer import Tokenizer  # tiktoken: only when a sample is opened

    config = run.load_config() if run.config_toml.exists() else Config()
    try:
        return Tokenizer.load(tokenizer_dir(config.target.tokenizer)), ""
    except EyasError as e:
        return None, f"shown as ids: {e}"


def _with_ids(run: RunDir, rows: Sequence[Row]) -> dict[str, Sample]:
    """Only the rows asked for are decoded, so that one of 83,000 samples opens fast."""
    import pyarrow.parquet as pq

    ids = [r.sample_id for r in rows]
    light = {r.sample_id: r.sample for r in rows if r.sample is not None}
    out: dict[str, Sample] = {}
    for path in sorted(run.samples.glob("*.parquet")):
        columns = ["sample_id", "token_ids", "calls", "segments", "masked"]
        found = pq.read_table(path, columns=columns, filters=[("sample_id", "in", ids)])
        # Ids by numpy: pyarrow's own way holds the interpreter for a second on a reply of 2 MB.
        ids_of = [row.values.to_numpy().tolist() for row in found["token_ids"]]
        for record, token_ids in zip(
            found.drop_columns("token_ids").to_pylist(), ids_of, strict=True
        ):
            out[record["sample_id"]] = msgspec.structs.replace(
                light[record["sample_id"]],
                token_ids=token_ids,
                masked=record["masked"] or [],
                calls=msgspec.json.decode(record["calls"] or "[]", type=list[ToolCall]),
                segments=msgspec.json.decode(record["segments"] or "[]", type=list[Segment]),
            )
        if len(out) == len(ids):
            break
    return out


def _raw_reply(run: RunDir, prompt_id: str) -> str:
    """The newest reply to a prompt, as received. Searched as bytes from the end: the other replies,
    gigabytes of a long run, are not decoded."""
    try:
        with (
            run.completions.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as lines,
        ):
            quoted = msgspec.json.encode(prompt_id)
            end = len(lines)
            while (found := lines.rfind(quoted, 0, end)) >= 0:
                end = lines.rfind(b"\n", 0, found) + 1
                for rollout in _readable(run, end):
                    if rollout.prompt_id == prompt_id:
                        return (rollout.reply_raw or rollout.error or "")[:RAW_CHARS]
    except (FileNotFoundError, ValueError):  # nothing there yet; an empty file cannot be mapped
        pass
    return ""


def _readable(run: RunDir, offset: int) -> Iterator[Rollout]:
    """The record at an offset; none when its line is torn or damaged."""
    with contextlib.suppress(ValueError, msgspec.MsgspecError):
        yield from read_at(run.completions, [offset], Rollout)
