"""Carry out a decision: `eyas audit RUN --apply keep|mask|filter|regenerate`.

What is decided is kept in decisions.jsonl, one Mark a sample, and laid over the samples whenever
they are rebuilt; the samples themselves stay a function of prompts and completions. Nothing is
deleted: a dropped sample stays with the reason, the replies of a regenerated prompt move to a side
file, the books keep every cent. Every file appears by rename.
"""

import array
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import msgspec

from core.audit.decide import DECISIONS, Decision
from core.audit.reading import Reader
from core.audit.record import AuditReport, load_audit, save_audit
from core.audit.semantics import REFERENCE
from core.audit.traits import edge_positions, positions_of, provider_of
from core.errors import StoreError, UsageError
from core.halting import engine_pid
from core.render.source import renderer_of
from core.schema import Finding, Sample
from core.store import (
    RunDir,
    encode_line,
    only_one,
    read_jsonl,
    read_samples,
    write_atomic,
    write_samples,
)

EDGES = "provider_trims_whitespace"


class Mark(msgspec.Struct, kw_only=True, frozen=True):
    """What an applied audit decided for one sample. `crc` is of its ids: ids that were rebuilt
    differently since are not what was judged, and the sample is dropped until it is judged again.
    """

    v: int = 1
    sample_id: str
    action: Literal["drop", "mask"]
    positions: list[int] = []
    reason: str
    crc: int


class Applied(msgspec.Struct, kw_only=True):
    """What an application did. `pending`: prompts that the next resume asks again."""

    decision: str
    datasets: list[str]
    samples: int = 0
    tokens: int = 0
    paid_usd: float = 0.0
    pending: int = 0
    advice: str = ""


def apply(run: RunDir, decision: str, datasets: Iterable[str] = ()) -> dict[str, Any]:
    """Apply one decision to `datasets` (none: all; `regenerate`: those that the audit says it of).

    Raises UsageError for an unknown decision or dataset, or when there is nothing to act on, and
    StoreError while an engine works on the run or when it has not been audited.
    """
    known = next((d for d in DECISIONS if d == decision), None)
    if known is None:
        raise UsageError(f"--apply {decision}: not known; use {', '.join(DECISIONS)}")
    if pid := engine_pid(run.path):
        raise StoreError(f"{run.run_id}: its engine (pid {pid}) is working; halt it first")
    with only_one(run):  # an engine that starts meanwhile would read files half way through
        audit = load_audit(run)
        chosen = _chosen(audit, known, list(datasets))
        act = {"keep": _keep, "mask": _mask, "filter": _filter, "regenerate": _regenerate}[known]
        done = act(run, audit, chosen)
        audit.applied.append(msgspec.to_builtins(done))
        save_audit(run, audit)
    result: dict[str, Any] = msgspec.to_builtins(done)
    return result


def marks(run: RunDir) -> dict[str, list[Mark]]:
    """Every mark of a run by sample."""
    found: dict[str, list[Mark]] = {}
    for mark in read_jsonl(run.decisions, Mark):
        found.setdefault(mark.sample_id, []).append(mark)
    return found


def marked(samples: Iterable[Sample], by_sample: dict[str, list[Mark]]) -> Iterator[Sample]:
    """Lay the marks over samples; a sample without one passes as it is."""
    for sample in samples:
        mine = by_sample.get(sample.sample_id)
        yield _lay(sample, mine) if mine else sample


def _lay(sample: Sample, mine: list[Mark]) -> Sample:
    if any(m.crc != crc(sample) for m in mine):
        return msgspec.structs.replace(sample, dropped="rebuilt differently since it was audited")
    drop = next((m.reason for m in mine if m.action == "drop"), "")
    positions = {i for m in mine if m.action == "mask" for i in m.positions}
    return msgspec.structs.replace(sample, dropped=drop, masked=sorted(positions))


def crc(sample: Sample) -> int:
    return zlib.crc32(array.array("I", sample.token_ids).tobytes())


def _chosen(audit: AuditReport, decision: Decision, names: list[str]) -> list[str]:
    known = [d.dataset for d in audit.decisions]
    if unknown := [n for n in names if n not in known]:
        raise UsageError(f"dataset {unknown[0]!r}: not in this run; it has {', '.join(known)}")
    if names:
        return names
    if decision != "regenerate":
        return known
    due = [d.dataset for d in audit.decisions if d.decision == "regenerate"]
    if not due:
        raise UsageError(
            "--apply regenerate: the audit asks for it nowhere; name a dataset to force it"
        )
    return due


def _keep(run: RunDir, audit: AuditReport, chosen: list[str]) -> Applied:
    """Forget earlier marks of these datasets."""
    ids = {s.sample_id for s in read_samples(run, ["dataset"]) if s.dataset in chosen}
    kept = [m for m in read_jsonl(run.decisions, Mark) if m.sample_id not in ids]
    _write_marks(run, kept)
    _rewrite_samples(run)
    return Applied(decision="keep", datasets=chosen)


def _mask(run: RunDir, audit: AuditReport, chosen: list[str]) -> Applied:
    """Findings at known positions, and the segment edges of providers that trim whitespace."""
    config = run.load_config()
    trims = {h.provider for h in audit.semantics.habits if h.trims}
    errors = _errors(run)
    reader = Reader(renderer_of(config)) if trims else None
    new, done = [], Applied(decision="mask", datasets=chosen)
    for sample in _trained(run, chosen):
        found = errors.get(sample.sample_id, [])
        positions: set[int] = set()
        reasons = []
        if found and all(f.spans for f in found):
            positions.update(positions_of(found))
            reasons += sorted({f.rule for f in found})
        if reader and provider_of(sample) in trims and sample.arm != REFERENCE:
            positions.update(edge_positions(reader.read(sample)))
            reasons.append(EDGES)
        if positions:
            new.append(_mark(sample, "mask", ", ".join(reasons), sorted(positions)))
            done.samples += 1
            done.tokens += len(positions)
            share = len(positions) / max(1, len(sample.token_ids) - sample.prompt_len)
            done.paid_usd += (sample.cost_usd or 0.0) * min(1.0, share)
    _add_marks(run, new)
    return done


def _filter(run: RunDir, audit: AuditReport, chosen: list[str]) -> Applied:
    """Every trained sample with an error finding."""
    errors = _errors(run)
    new, done = [], Applied(decision="filter", datasets=chosen)
    for sample in _trained(run, chosen):
        if found := errors.get(sample.sample_id):
            new.append(_mark(sample, "drop", ", ".join(sorted({f.rule for f in found}))))
            done.samples += 1
            done.tokens += len(sample.token_ids) - sample.prompt_len
            done.paid_usd += sample.cost_usd or 0.0
    _add_marks(run, new)
    return done


def _regenerate(run: RunDir, audit: AuditReport, chosen: list[str]) -> Applied:
    """Set aside the replies of the scopes that the audit wants again (in a dataset without such a
    scope: of the samples with an error), so that their prompts are pending."""
    scopes = {
        (d.dataset, s.provider, s.arm)
        for d in audit.decisions
        for s in d.scopes
        if s.decision == "regenerate" and d.dataset in chosen
    }
    whole = {dataset for dataset, _, _ in scopes}
    errors = _errors(run)
    again: set[str] = set()
    done = Applied(decision="regenerate", datasets=chosen)
    for sample in read_samples(run):
        if sample.dataset not in chosen:
            continue
        hit = (sample.dataset, provider_of(sample), sample.arm) in scopes
        if hit or (sample.dataset not in whole and sample.trainable and sample.sample_id in errors):
            again.add(sample.prompt_id)
            done.samples += 1
            done.tokens += (len(sample.token_ids) - sample.prompt_len) if sample.trainable else 0
            done.paid_usd += sample.cost_usd or 0.0
    if not again:
        raise UsageError(f"--apply regenerate: nothing to ask again in {', '.join(chosen)}")
    _set_aside(run, again)
    _write_marks(run, [m for m in read_jsonl(run.decisions, Mark) if m.sample_id not in again])
    _rewrite_samples(run, lambda s: s.prompt_id not in again)
    done.pending = len(again)
    bad = sorted({provider for _, provider, arm in scopes if arm != REFERENCE})
    ignore = f"add {', '.join(map(repr, bad))} to generate.openrouter.ignore, then " if bad else ""
    done.advice = f"{ignore}eyas resume {run.run_id}"
    return done


class _Head(msgspec.Struct, kw_only=True):
    prompt_id: str


def _set_aside(run: RunDir, again: set[str]) -> None:
    """Move the lines of these prompts from completions.jsonl to completions.N.regenerated.jsonl.

    The side file is complete before the main file is replaced, so a kill in between loses nothing.
    """
    side = next(
        path
        for n in range(1, 1_000_000)
        if not (path := run.path / f"completions.{n}.regenerated.jsonl").exists()
    )
    temporaries = [p.with_name(f".{p.name}.{os.getpid()}.tmp") for p in (side, run.completions)]
    try:
        with (
            run.completions.open("rb") as source,
            temporaries[0].open("wb") as moved,
            temporaries[1].open("wb") as kept,
        ):
            for line in source:
                (moved if _prompt_of(line) in again else kept).write(line)
            for file in (moved, kept):
                file.flush()
                os.fsync(file.fileno())
        temporaries[0].replace(side)
        temporaries[1].replace(run.completions)
    except OSError as e:
        for temporary in temporaries:
            temporary.unlink(missing_ok=True)
        raise StoreError(f"{run.completions}: cannot be rewritten ({e.strerror})") from e


_decode_head = msgspec.json.Decoder(_Head).decode


def _prompt_of(line: bytes) -> str:
    """A torn or foreign line belongs to no prompt and stays where it is."""
    try:
        return _decode_head(line).prompt_id
    except msgspec.MsgspecError:
        pass
    try:
        return str(json.loads(line)["prompt_id"])  # lone surrogates: msgspec refuses them
    except (ValueError, KeyError, TypeError):
        return ""


def _trained(run: RunDir, chosen: list[str]) -> Iterator[Sample]:
    """Trainable samples of these datasets, as rebuilt: earlier marks do not hide anything."""
    for sample in read_samples(run):
        plain = msgspec.structs.replace(sample, dropped="", masked=[])
        if plain.dataset in chosen and plain.trainable:
            yield plain


def _errors(run: RunDir) -> dict[str, list[Finding]]:
    found: dict[str, list[Finding]] = {}
    for finding in read_jsonl(run.findings, Finding):
        if finding.severity == "error":
            found.setdefault(finding.sample_id, []).append(finding)
    return found


def _mark(
    sample: Sample, action: Literal["drop", "mask"], reason: str, positions: list[int] | None = None
) -> Mark:
    return Mark(
        sample_id=sample.sample_id,
        action=action,
        positions=positions or [],
        reason=reason,
        crc=crc(sample),
    )


def _add_marks(run: RunDir, new: list[Mark]) -> None:
    """New marks replace older ones of the same kind on the same sample."""
    fresh = {(m.sample_id, m.action) for m in new}
    old = [m for m in read_jsonl(run.decisions, Mark) if (m.sample_id, m.action) not in fresh]
    _write_marks(run, [*old, *new])
    _rewrite_samples(run)


def _write_marks(run: RunDir, all_marks: Iterable[Mark]) -> None:
    write_atomic(run.decisions, b"".join(encode_line(m) for m in all_marks))


def _rewrite_samples(run: RunDir, keep: Callable[[Sample], bool] = lambda _: True) -> None:
    """The same samples under the marks as they are now."""
    by_sample = marks(run)
    samples = (
        msgspec.structs.replace(s, dropped="", masked=[]) for s in read_samples(run) if keep(s)
    )
    write_samples(run, marked(samples, by_sample))
