"""The draft vocabulary: which D of the target's V tokens the drafter can say, and how its ids map
to the target's.

Counts supervised tokens of training samples only (never prompts, never held-out samples). Knows
samples, no models."""

# V target vocabulary, D draft vocabulary

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save

from core import events as ev
from core.config import Config
from core.drafter.data import is_heldout, usable_samples
from core.errors import StoreError, TrainError, boundary
from core.schema import Sample
from core.store import RunDir, write_atomic
from core.target import target_dir, text_config


@dataclass(frozen=True)
class DraftVocab:
    """`d2t_D[i]` is an OFFSET: target id = i + d2t_D[i]. `t2d_V[t]` says whether target id t can be
    drafted."""

    d2t_D: NDArray[np.int64]
    t2d_V: NDArray[np.bool_]

    @property
    def used_D(self) -> NDArray[np.int64]:
        """Target ids of draft ids 0..D-1, strictly ascending."""
        return self.d2t_D + np.arange(len(self.d2t_D), dtype=np.int64)

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.d2t_D.tobytes() + self.t2d_V.tobytes()).hexdigest()


def build(counts: Mapping[int, int], vocab_size: int, draft_vocab_size: int) -> DraftVocab:
    """The D most frequent ids (ties: lower id first), filled with the lowest unused ids when fewer
    than D occur, in ascending order. D = 0 or D >= V: the whole vocabulary, whose offsets are all
    zero."""
    if draft_vocab_size == 0 or draft_vocab_size >= vocab_size:
        return from_used(range(vocab_size), vocab_size)
    ranked = sorted(counts, key=lambda t: (-counts[t], t))[:draft_vocab_size]
    chosen = set(ranked)
    spare = (t for t in range(vocab_size) if t not in chosen)
    while len(chosen) < draft_vocab_size:
        chosen.add(next(spare))
    return from_used(sorted(chosen), vocab_size)


def from_used(used: Iterable[int], vocab_size: int) -> DraftVocab:
    """Maps of an ascending list of target ids; ids out of order, repeated or out of range are a
    TrainError."""
    used_D = np.fromiter(used, dtype=np.int64)
    if (
        used_D.size == 0
        or used_D[0] < 0
        or used_D[-1] >= vocab_size
        or not (np.diff(used_D) > 0).all()
    ):
        raise TrainError(
            f"draft vocabulary: ids must ascend strictly within 0..{vocab_size - 1}", kind="d2t"
        )
    t2d_V = np.zeros(vocab_size, dtype=np.bool_)
    t2d_V[used_D] = True
    return DraftVocab(used_D - np.arange(len(used_D), dtype=np.int64), t2d_V)


def check_maps(d2t_D: NDArray[np.int64], t2d_V: NDArray[np.bool_]) -> list[str]:
    """What an engine would misread in a pair of maps; empty when they are sound (case C64)."""
    used_D = d2t_D.astype(np.int64) + np.arange(len(d2t_D), dtype=np.int64)
    problems = []
    if len(used_D) and not (np.diff(used_D) > 0).all():
        problems.append(
            "d2t: targets do not ascend strictly; d2t holds offsets (id - index), not ids"
        )
    if len(used_D) and (used_D[0] < 0 or used_D.max() >= len(t2d_V)):
        problems.append(
            f"d2t: a target lies outside 0..{len(t2d_V) - 1}; d2t holds offsets, not ids"
        )
    if int(t2d_V.sum()) != len(d2t_D):
        problems.append(f"t2d: {int(t2d_V.sum())} ids marked, d2t has {len(d2t_D)}")
    elif not problems and not np.array_equal(np.flatnonzero(t2d_V), used_D):
        problems.append(
            "t2d: marks other ids than d2t names; d2t holds offsets (id - index), not ids"
        )
    return problems


def coverage(vocab: DraftVocab, counts: Mapping[str, Mapping[int, int]]) -> dict[str, float]:
    """Share of supervised tokens that can be drafted, per dataset."""
    shares = {}
    for dataset, by_id in sorted(counts.items()):
        total = sum(by_id.values())
        covered = sum(n for t, n in by_id.items() if vocab.t2d_V[t])
        shares[dataset] = covered / total if total else 0.0
    return shares


def save_vocab(vocab: DraftVocab, path: Path) -> None:
    write_atomic(path, save({"d2t": vocab.d2t_D, "t2d": vocab.t2d_V}))


def load_vocab(path: Path) -> DraftVocab:
    if not path.exists():
        raise StoreError(f"{path}: no draft vocabulary; run the vocab stage first", kind="no_vocab")
    with boundary(StoreError, str(path)):
        tensors = load_file(path)
        vocab = DraftVocab(tensors["d2t"], tensors["t2d"].astype(np.bool_))
    if problems := check_maps(vocab.d2t_D, vocab.t2d_V):
        raise StoreError(f"{path}: {problems[0]}; run the vocab stage again", kind="d2t")
    return vocab


def count_tokens(
    samples: Iterable[Sample], holdout: float, max_length: int, vocab_size: int
) -> tuple[dict[str, Counter[int]], dict[str, Counter[int]]]:
    """Supervised tokens of (training, held-out) samples by dataset, as far as extraction keeps
    them."""
    train: dict[str, Counter[int]] = {}
    heldout: dict[str, Counter[int]] = {}
    for sample in samples:
        masked = set(sample.masked)
        end = min(len(sample.token_ids), max_length)
        supervised = [sample.token_ids[i] for i in range(sample.prompt_len, end) if i not in masked]
        if supervised and not 0 <= min(supervised) <= max(supervised) < vocab_size:
            raise TrainError(
                f"{sample.sample_id}: token ids outside the target's vocabulary of {vocab_size}; "
                "samples and target do not belong together",
                kind="tokenizer_mismatch",
            )
        side = heldout if is_heldout(sample.twin_id, holdout) else train
        side.setdefault(sample.dataset, Counter()).update(supervised)
    return train, heldout


def run(
    run: RunDir, config: Config, emit: Callable[[ev.Event], None], should_stop: Callable[[], bool]
) -> dict[str, Any]:
    """Write vocab.safetensors. The summary holds D and the coverage per dataset, training and
    held-out."""
    vocab_size = int(text_config(target_dir(config)).vocab_size)
    train, heldout = count_tokens(
        usable_samples(run), config.eval.holdout, config.extract.max_length, vocab_size
    )
    total: Counter[int] = Counter()
    for by_id in train.values():
        total.update(by_id)
    if not total:
        raise TrainError(
            "no supervised token in any trainable sample outside the held-out share; "
            "look at the verdicts (eyas report) or lower eval.holdout",
            kind="no_supervision",
        )
    vocab = build(total, vocab_size, config.draft.vocab_size)
    save_vocab(vocab, run.vocab)
    emit(ev.StageProgress(stage="vocab", done=sum(total.values()), total=sum(total.values())))
    everything: Counter[int] = Counter()
    for by_id in heldout.values():
        everything.update(by_id)
    shares = coverage(vocab, {"train": total, "heldout": everything})
    by_dataset = coverage(vocab, heldout or train)
    return {
        "draft_vocab_size": len(vocab.d2t_D),
        "distinct_tokens": len(total),
        "supervised_tokens": sum(total.values()),
        "coverage": shares["train"],
        "coverage_heldout": shares["heldout"] if heldout else None,
        "coverage_by_dataset": ", ".join(f"{n} {s:.1%}" for n, s in by_dataset.items()),
    }
