"""Samples of a run for the probe: listing, opening one with its twins, and the run's own tokenizer.
Runs in threads.

Reads samples/*.parquet when the reconstruct stage has written it; before that only what the events
said is known, and a reply is shown as it was received.
"""

import contextlib
import mmap
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec

from console.sanitize import clean
from core.config import Config
from core.errors import EyasError, StoreError
from core.events import Outcome
from core.schema import Prompt, Rollout, Sample, reply_text
from core.store import RunDir, find_samples, read_at, read_samples

if TYPE_CHECKING:
    from core.reconstruct.trials import Trial
    from core.render.base import Renderer
    from core.render.tokenizer import TokenizerLike

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
    "rebuilt_tokens",
    "billed_tokens",
    "cost_usd",
]
RAW_CHARS = 40_000
T = TypeVar("T", Rollout, Prompt)


class Row(NamedTuple):
    """A line of the list. `rebuilt`: there is a sample to open, not only an outcome."""

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
    rebuilt: bool


class Opened(NamedTuple):
    """What the detail screen shows. `raw` stands in when there are no ids yet. `twins`: the other
    samples of the same question, the one compared with first.
    """

    row: Row
    sample: Sample | None
    twins: list[Sample]
    tokenizer: "TokenizerLike | None"
    raw: str
    note: str
    trials: "list[Trial]"

    @property
    def twin(self) -> Sample | None:
        return self.twins[0] if self.twins else None


def row_of(s: Sample) -> Row:
    return Row(
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
        True,
    )


def _row_of_outcome(o: Outcome) -> Row:
    return Row(
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
        False,
    )


def sides(sample: Sample, twin: Sample) -> tuple[Sample, Sample]:
    """What stands at the left and at the right of a difference: a local one at the left."""
    return (sample, twin) if sample.arm == "local" else (twin, sample)


def side_name(sample: Sample) -> str:
    """An arm, and who answered where that is not this machine's own server."""
    who = "" if sample.arm == "local" else f" · {sample.provider or sample.backend}"
    return clean(f"{sample.arm}{who}"[:200])


def signature(run: RunDir) -> tuple[tuple[str, int, int], ...]:
    """Changes when the samples on disk do: 83,000 of them take a second to list."""
    found = []
    for path in sorted(run.samples.glob("*.parquet")):
        with contextlib.suppress(OSError):  # replaced meanwhile
            info = path.stat()
            found.append((path.name, info.st_mtime_ns, info.st_size))
    return tuple(found)


def rows_of(run: RunDir, outcomes: Sequence[Outcome], most: int | None = None) -> list[Row]:
    """All samples on disk, or the first `most`; before the reconstruct stage, the newest
    outcomes.
    """
    rows = [row_of(s) for s in islice(read_samples(run, LISTED), most)]
    return rows + outcome_rows(rows, outcomes)


def outcome_rows(rows: Sequence[Row], outcomes: Sequence[Outcome]) -> list[Row]:
    """What has ended and has no sample yet, newest first."""
    known = {row.prompt_id for row in rows}
    found = []
    for o in reversed(outcomes):
        if o.prompt_id not in known and o.outcome != "aborted":
            known.add(o.prompt_id)
            found.append(_row_of_outcome(o))
    return found


def find_row(run: RunDir, name: str, outcomes: Sequence[Outcome] = ()) -> Row:
    """A sample by id or the unique beginning of one. Raises StoreError."""
    samples = find_samples(run, "sample_id", name, prefix=True)
    rows = [row_of(s) for s in samples]
    rows += [r for r in outcome_rows(rows, outcomes) if r.sample_id.startswith(name)]
    exact = [r for r in rows if r.sample_id == name]
    if len(exact or rows) != 1:
        what = "several samples of this run begin" if rows else "no sample of this run begins"
        raise StoreError(f"{name}: {what} like this; `eyas probe RUN` lists them")
    return (exact or rows)[0]


def open_sample(run: RunDir, row: Row, against: str = "") -> Opened:
    """The sample with ids, its twins (local arm first, for a local sample the others as they
    come; or the one asked for), tokenizer, and what the hypotheses make of its reply.
    """
    renderer, note = _renderer(run)
    tokenizer = renderer.tokenizer if renderer else None
    found = find_samples(run, "sample_id", row.sample_id) if row.rebuilt else []
    if not found:
        rollout = _newest(run.completions, row.prompt_id, Rollout)
        raw = (reply_text(rollout) or rollout.error or "")[:RAW_CHARS] if rollout else ""
        note = note or "ids and verdict come with the reconstruct stage"
        return Opened(row, None, [], tokenizer, raw, note, [])
    sample = found[0]
    twins = twins_of(run, sample, against)
    return Opened(
        row, sample, twins, tokenizer, "", note, _trials(run, sample, renderer) if renderer else []
    )


def twins_of(run: RunDir, sample: Sample, against: str = "") -> list[Sample]:
    """Samples of the same question, local ones first; with `against` that one alone. Raises
    StoreError.
    """
    if against:
        other = find_row(run, against)
        return find_samples(run, "sample_id", other.sample_id)
    if not sample.twin_id:
        return []
    same = find_samples(run, "twin_id", sample.twin_id)
    others = [s for s in same if s.sample_id != sample.sample_id]
    return sorted(others, key=lambda s: s.arm != "local")


def _renderer(run: RunDir) -> tuple["Renderer | None", str]:
    from core.render.source import renderer_of  # tiktoken: only when a sample is opened

    config = run.load_config() if run.config_toml.exists() else Config()
    try:
        return renderer_of(config), ""
    except EyasError as e:
        return None, f"shown as ids: {e}"


def _trials(run: RunDir, sample: Sample, renderer: "Renderer") -> "list[Trial]":
    """Only where a count was off: elsewhere no hypothesis was needed."""
    if sample.verdict not in ("hypothesis", "mismatch"):
        return []
    from core.reconstruct.trials import trials

    rollout = _newest(run.completions, sample.prompt_id, Rollout)
    prompt = _newest(run.prompts, sample.prompt_id, Prompt)
    if rollout is None or prompt is None:
        return []
    return trials(rollout, prompt, renderer, sample.billed_tokens)


def _newest(path: Path, prompt_id: str, kind: type[T]) -> T | None:
    """The newest record of a prompt. Searched as bytes from the end: the other records, gigabytes
    of a long run, are not decoded."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as lines:
            quoted = msgspec.json.encode(prompt_id)
            end = len(lines)
            while (found := lines.rfind(quoted, 0, end)) >= 0:
                end = lines.rfind(b"\n", 0, found) + 1
                for record in _readable(path, end, kind):
                    if record.prompt_id == prompt_id:
                        return record
    except (FileNotFoundError, ValueError):  # nothing there yet; an empty file cannot be mapped
        pass
    return None


def _readable(path: Path, offset: int, kind: type[T]) -> Iterator[T]:
    """The record at an offset; none when its line is torn or damaged."""
    with contextlib.suppress(ValueError, msgspec.MsgspecError):
        yield from read_at(path, [offset], kind)
