"""Hidden states of the target for every trainable sample: one forward pass, batches of similar
length.

Also keeps each completion token's log-probability and the target's own choice at each position, and
checks itself: rows equal ids, states are finite, a row in a batch equals the row alone, and the
stored last state predicts the next token. Finished samples are never extracted again, unless their
ids have changed since. Knows samples and the target, nothing about drafters."""

# B rows, T positions, H hidden size, C = 4 captured states (see core.features), V target
# vocabulary, N completion positions of a batch, flat

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from core import events as ev
from core.config import Config
from core.errors import CaptureError, Halted
from core.features import (
    FeatureMeta,
    FeatureRow,
    FeatureWriter,
    bytes_per_token,
    check_finite,
    check_rows,
    refuse_if_too_big,
    to_boundaries,
)
from core.schema import Sample
from core.store import RunDir, read_samples
from core.target import DTYPES, Target, settle_threads, target_dir, target_fingerprint

LOGITS_BUDGET = 1 << 26
"""Logits held at once (elements): 256 MiB in float32."""
BATCH_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.02}
"""Largest difference of a state in a batch from the same state alone, relative to the state's
largest value."""
NON_FINITE_LIMIT = 0.01
LOW_MATCH = 0.2
"""Below this share of completion tokens that the target itself would choose, the states are
probably misaligned."""


@dataclass(frozen=True)
class Fitted:
    """One sample cut to length. `flags` holds "truncated" when something was cut off."""

    sample_id: str
    twin_id: str
    dataset: str
    prompt_len: int
    ids: NDArray[np.int32]
    mask: NDArray[np.bool_]
    flags: tuple[str, ...] = ()


@dataclass
class Tally:
    """What happened to the samples. `chosen` / `scored`: completion tokens that are the target's
    own argmax."""

    samples: int = 0
    tokens: int = 0
    scored: int = 0
    chosen: int = 0
    logprob: float = 0.0
    truncated: int = 0
    already_done: int = 0
    dropped: dict[str, int] = field(default_factory=dict)

    def drop(self, kind: str) -> None:
        self.dropped[kind] = self.dropped.get(kind, 0) + 1


def fit(
    token_ids: Sequence[int], loss_mask: Sequence[bool], max_length: int
) -> tuple[NDArray[np.int32], NDArray[np.bool_], tuple[str, ...]]:
    """Cut ids and mask together; nothing is appended (case C62). CaptureError of kind
    `length_mismatch` when they differ in length, `all_masked` when nothing supervised is left."""
    if len(token_ids) != len(loss_mask):
        raise CaptureError(
            f"{len(token_ids)} ids but {len(loss_mask)} mask values; rebuild the sample",
            kind="length_mismatch",
        )
    ids = np.asarray(token_ids[:max_length], dtype=np.int32)
    mask = np.asarray(loss_mask[:max_length], dtype=np.bool_)
    if not mask.any():
        raise CaptureError(f"no supervised token within the first {max_length}", kind="all_masked")
    return ids, mask, ("truncated",) if len(token_ids) > max_length else ()


def fit_sample(sample: Sample, max_length: int) -> Fitted:
    ids, mask, flags = fit(sample.token_ids, sample.loss_mask, max_length)
    if sample.prompt_len < 1:
        raise CaptureError(f"{sample.sample_id}: no prompt token to draft from", kind="no_prompt")
    return Fitted(
        sample.sample_id, sample.twin_id, sample.dataset, sample.prompt_len, ids, mask, flags
    )


def length_buckets(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Indices in ascending length, rows x longest <= batch_tokens (a longer row is alone)."""
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        if batches and lengths[i] * (len(batches[-1]) + 1) <= batch_tokens:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


def padded(rows: Sequence[Fitted]) -> torch.Tensor:
    """[B, T] ids, padded on the right."""
    ids_BT = torch.zeros(len(rows), max(len(row.ids) for row in rows), dtype=torch.long)
    for b, row in enumerate(rows):
        ids_BT[b, : len(row.ids)] = torch.from_numpy(row.ids)
    return ids_BT


def capture_rows(
    target: Target, rows: Sequence[Fitted], store: torch.dtype
) -> list[FeatureRow | CaptureError]:
    """States, log-probabilities and argmax of a batch; a row with a non-finite state is an error in
    its place."""
    ids_BT = padded(rows)
    states_BTCH = target.capture(ids_BT)
    check_rows("batch", ids_BT.shape[1], states_BTCH.shape[1])
    out: list[FeatureRow | CaptureError] = []
    for b, row in enumerate(rows):
        states_TCH = states_BTCH[b, : len(row.ids)]
        try:
            check_finite(row.sample_id, states_TCH, target.names)
            stored_TCH = states_TCH.to(store).cpu()
            check_finite(row.sample_id, stored_TCH, [f"{name} as {store}" for name in target.names])
        except CaptureError as e:
            out.append(e)
            continue
        logprob_T, top1_T = score(
            target, states_TCH[:, 3], ids_BT[b, : len(row.ids)], row.prompt_len
        )
        out.append(
            FeatureRow(
                sample_id=row.sample_id,
                twin_id=row.twin_id,
                dataset=row.dataset,
                prompt_len=row.prompt_len,
                ids_T=ids_BT[b, : len(row.ids)],
                mask_T=torch.from_numpy(row.mask),
                states_TCH=stored_TCH,
                logprob_T=logprob_T,
                top1_T=top1_T,
            )
        )
    return out


def score(
    target: Target, last_TH: torch.Tensor, ids_T: torch.Tensor, prompt_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log p of every completion token under the target, 0 on prompt tokens; argmax at positions >=
    P - 1, else -1)."""
    length, first = ids_T.numel(), prompt_len - 1
    logprob_T = torch.zeros(length)
    top1_T = torch.full((length,), -1, dtype=torch.long)
    chunk = max(1, LOGITS_BUDGET // target.vocab_size)
    for start in range(first, length, chunk):
        end = min(start + chunk, length)
        logits_NV = target.logits(last_TH[start:end])
        top1_T[start:end] = logits_NV.argmax(-1).cpu()
        following = ids_T[start + 1 : end + 1].to(logits_NV.device)
        spread_N = torch.log_softmax(logits_NV[: following.numel()], -1)
        taken = spread_N.gather(1, following[:, None])[:, 0]
        logprob_T[start + 1 : start + 1 + following.numel()] = taken.cpu()
    return logprob_T, top1_T


def check_batch_against_single(target: Target, rows: Sequence[Fitted], dtype: str) -> float:
    """Largest relative difference of the shortest row's states in this batch from the same row
    alone."""
    shortest = min(range(len(rows)), key=lambda b: len(rows[b].ids))
    length = len(rows[shortest].ids)
    ids_BT = padded(rows)
    together = target.capture(ids_BT)[shortest, :length]
    alone = target.capture(ids_BT[shortest : shortest + 1, :length])[0]
    gap = float((together - alone).abs().max() / alone.abs().max().clamp_min(1e-30))
    if not gap <= BATCH_TOLERANCE[dtype]:
        raise CaptureError(
            f"{rows[shortest].sample_id}: states in a batch of {len(rows)} differ from the row "
            f"alone by {gap:.3g}; the model mixes rows: set extract.batch_tokens to extract one "
            "row at a time",
            kind="batch_mismatch",
        )
    return gap


def run(
    run: RunDir, config: Config, emit: Callable[[ev.Event], None], should_stop: Callable[[], bool]
) -> dict[str, Any]:
    """Extract what is not extracted yet. Halted (everything finished is kept) when asked to
    stop."""
    settings, directory = config.extract, target_dir(config)
    target = Target.load(directory, settings.aux_layers, config.target.dtype, config.target.device)
    settle_threads(config.train.threads, config.target.device, target.hidden_size)
    meta = FeatureMeta(
        aux_layers=target.aux_layers,
        aux_boundaries=to_boundaries(target.aux_layers),
        num_layers=target.num_layers,
        hidden_size=target.hidden_size,
        dtype=settings.dtype,
        max_length=settings.max_length,
        target_sha256=target_fingerprint(directory),
    )
    writer = FeatureWriter(run.features, meta, settings.shard_bytes)
    tally = Tally()
    rows = list(_pending(run, settings.max_length, writer, target.vocab_size, tally))
    forecast = sum(len(row.ids) for row in rows) * bytes_per_token(
        target.hidden_size, DTYPES[settings.dtype]
    )
    refuse_if_too_big(run.features, forecast, config.run.min_free_disk_bytes)
    emit(
        ev.Log(
            stage="extract",
            message=f"{len(rows)} samples to extract, {tally.already_done} done; aux layers "
            f"{target.aux_layers}; "
            f"forecast {forecast / 1e6:.1f} MB",
        )
    )
    batch_gap = _extract_all(target, rows, config, writer, tally, emit, should_stop)
    return _summary(tally, writer, forecast, batch_gap, emit)


def _extract_all(
    target: Target,
    rows: Sequence[Fitted],
    config: Config,
    writer: FeatureWriter,
    tally: Tally,
    emit: Callable[[ev.Event], None],
    should_stop: Callable[[], bool],
) -> float | None:
    batch_gap, store = None, DTYPES[config.extract.dtype]
    for indices in length_buckets([len(row.ids) for row in rows], config.extract.batch_tokens):
        batch = [rows[i] for i in indices]
        if batch_gap is None and len(batch) > 1:
            batch_gap = check_batch_against_single(target, batch, config.target.dtype)
        for captured in capture_rows(target, batch, store):
            if isinstance(captured, CaptureError):
                _tolerate(captured, tally, emit)
                continue
            _count(captured, tally)
            writer.add(captured)
        tally.truncated += sum("truncated" in row.flags for row in batch)
        emit(
            ev.StageProgress(
                stage="extract",
                done=tally.samples,
                total=len(rows),
                detail=f"{writer.bytes_written / 1e6:.0f} MB",
            )
        )
        if should_stop():
            writer.flush()
            raise Halted(
                f"extraction stopped after {tally.samples} of {len(rows)} samples; "
                "resume goes on there"
            )
    writer.flush()
    return batch_gap


def _pending(
    run: RunDir, max_length: int, writer: FeatureWriter, vocab_size: int, tally: Tally
) -> Iterator[Fitted]:
    columns = ["sample_id", "twin_id", "dataset", "token_ids", "prompt_len", "verdict"]
    for sample in read_samples(run, columns):
        if not sample.trainable:
            continue
        try:
            fitted = fit_sample(sample, max_length)
        except CaptureError as e:
            tally.drop(e.kind)
            continue
        if writer.holds(sample.sample_id, fitted.ids):
            tally.already_done += 1
            continue
        if int(fitted.ids.max()) >= vocab_size or int(fitted.ids.min()) < 0:
            raise CaptureError(
                f"{sample.sample_id}: token id {int(fitted.ids.max())} outside the target's "
                f"vocabulary of {vocab_size}; samples and target do not belong together",
                kind="tokenizer_mismatch",
            )
        yield fitted


def _tolerate(error: CaptureError, tally: Tally, emit: Callable[[ev.Event], None]) -> None:
    """A non-finite sample is left out and said; more than 1 % of them stop the stage."""
    tally.drop(error.kind)
    emit(ev.Log(level="warn", stage="extract", message=str(error)))
    bad = tally.dropped[error.kind]
    if bad > 1 and bad > NON_FINITE_LIMIT * (tally.samples + bad):
        raise error


def _count(row: FeatureRow, tally: Tally) -> None:
    tally.samples += 1
    tally.tokens += row.length
    completion = slice(row.prompt_len, row.length)
    tally.scored += row.length - row.prompt_len
    tally.chosen += int(
        (row.top1_T[row.prompt_len - 1 : row.length - 1] == row.ids_T[completion]).sum()
    )
    tally.logprob += float(row.logprob_T[completion].double().sum())


def _summary(
    tally: Tally,
    writer: FeatureWriter,
    forecast: int,
    batch_gap: float | None,
    emit: Callable[[ev.Event], None],
) -> dict[str, Any]:
    match = tally.chosen / tally.scored if tally.scored else None
    if match is not None and match < LOW_MATCH:
        emit(
            ev.Log(
                level="warn",
                stage="extract",
                message=f"the target itself would choose only {match:.1%} of the completion "
                "tokens; check that these samples come from this target",
            )
        )
    return {
        "samples": tally.samples,
        "already_done": tally.already_done,
        "tokens": tally.tokens,
        "completion_tokens": tally.scored,
        "argmax_match": match,
        "mean_logprob": tally.logprob / tally.scored if tally.scored else None,
        "truncated": tally.truncated,
        "dropped": sum(tally.dropped.values()),
        "dropped_why": ", ".join(f"{kind} {n}" for kind, n in sorted(tally.dropped.items())),
        "forecast_bytes": forecast,
        "bytes": writer.bytes_written,
        "batch_against_single": batch_gap,
    }
