"""Train the drafter on stored hidden states: AdamW, TTT loss, checkpoints, and a guard against dead
or broken loss.

One process, one device. The trajectory is a function of (features, vocabulary, config): a run that
was stopped and resumed ends with the same bytes as one that was not. Raises TrainError; never
trains on past a NaN."""

# B rows, T positions, K TTT steps

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import torch

from core import events as ev
from core.config import Config
from core.drafter import checkpoint
from core.drafter.checkpoint import CheckpointState
from core.drafter.data import Batch, collate, is_heldout, masked_now, plan_batches, supervised_KT
from core.drafter.guard import Guard, learning_rate
from core.drafter.loss import LossResult, teach, ttt_loss
from core.drafter.model import DraftConfig, Drafter
from core.drafter.vocab import DraftVocab, load_vocab
from core.errors import Halted, TrainError
from core.features import FeatureMeta, FeatureReader
from core.schema import FeatureRef
from core.store import RunDir
from core.target import TargetHead, eos_ids, load_head, settle_threads, target_dir, text_config

EVENTS_PER_S = 2.0
TRAJECTORY = (
    "ttt_steps",
    "loss_decay",
    "mask_align",
    "normalise",
    "lr",
    "warmup_ratio",
    "schedule",
    "weight_decay",
    "clip",
    "batch_tokens",
    "epochs",
    "max_steps",
    "dtype",
)
"""Fields of [train] that a resume must not change."""
DATA = ("features", "vocabulary")
"""Parts of the contract that an applied audit changes."""


def draft_config(config: Config, meta: FeatureMeta, draft_vocab_size: int) -> DraftConfig:
    """Shape of the drafter: [draft] where it says something, the target's otherwise."""
    directory = target_dir(config)
    hf, draft = text_config(directory), config.draft
    heads = draft.num_heads or int(hf.num_attention_heads)
    rope = dict(hf.rope_parameters)
    if draft.rope_theta:
        rope["rope_theta"] = float(draft.rope_theta)
    kv_heads = draft.num_kv_heads or int(getattr(hf, "num_key_value_heads", None) or heads)
    if heads % kv_heads or meta.hidden_size % heads:
        raise TrainError(
            f"draft.num_heads {heads} must be a multiple of num_kv_heads {kv_heads} and divide the "
            f"hidden size {meta.hidden_size}; change draft.num_heads or draft.num_kv_heads"
        )
    return DraftConfig(
        hidden_size=meta.hidden_size,
        intermediate_size=draft.intermediate_size or int(hf.intermediate_size),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_head_dim(hf, draft.num_heads),
        rms_eps=float(hf.rms_norm_eps),
        vocab_size=int(hf.vocab_size),
        draft_vocab_size=draft_vocab_size,
        rope_parameters=rope,
        max_position_embeddings=draft.max_position_embeddings or int(hf.max_position_embeddings),
        aux_layers=meta.aux_layers,
        bos_id=hf.bos_token_id if isinstance(hf.bos_token_id, int) else None,
        eos_ids=eos_ids(directory),
    )


def _head_dim(hf: Any, heads: int) -> int:
    """The target's, when its heads are plain; 128 for latent attention (as the Kimi drafters in
    use)."""
    if getattr(hf, "kv_lora_rank", None):
        return 128
    if heads and heads != hf.num_attention_heads:
        return int(hf.hidden_size) // heads
    return int(getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads)


class Trainer:
    """Drafter, optimizer and data cursor. `steps()` yields after every micro-step."""

    def __init__(
        self,
        config: Config,
        reader: FeatureReader,
        head: TargetHead,
        vocab: DraftVocab,
        masked: Mapping[str, Sequence[int]],
    ) -> None:
        self.config, self._reader, self._head = config, reader, head
        self.lessons = lessons(config, reader, masked)
        lengths = [x.ref.num_tokens for x in self.lessons]
        train = config.train
        self._lengths = lengths
        self._batches_per_epoch = [len(self._batches(e)) for e in range(train.epochs)]
        everything = sum(self._batches_per_epoch)
        self.total_steps = min(everything, train.max_steps) if train.max_steps else everything
        draft = draft_config(config, reader.meta, len(vocab.d2t_D))
        if draft.max_position_embeddings < max(lengths):
            raise TrainError(
                f"draft.max_position_embeddings {draft.max_position_embeddings} is below the "
                "longest "
                f"sample ({max(lengths)} tokens); raise it or lower extract.max_length",
                kind="max_position",
            )
        self.drafter = Drafter.fresh(
            draft,
            head,
            torch.from_numpy(vocab.d2t_D),
            torch.from_numpy(vocab.t2d_V),
            config.run.seed,
        ).to(train.device)
        self.optimizer = make_optimizer(self.drafter, config)
        self.step = self.epoch = self.batch = self.tokens = 0
        self.loss, self.accuracy_K, self.checkpoint_step = 0.0, [0.0] * train.ttt_steps, 0
        self.contract = _contract(config, self.lessons, vocab, draft, reader.meta.target_sha256)
        self._guard = Guard()
        torch.manual_seed(config.run.seed)

    def _batches(self, epoch: int) -> list[list[int]]:
        return plan_batches(
            self._lengths, self.config.train.batch_tokens, self.config.run.seed, epoch
        )

    def resume(self, path: Path) -> None:
        state = checkpoint.read_state(path)
        checkpoint.check_contract(path, state.contract, self.contract)
        loaded, _ = checkpoint.load_drafter(path, self._head)
        self.drafter.load_state_dict(loaded.state_dict())
        checkpoint.restore_optimizer(path, self.drafter, self.optimizer)
        self.step, self.epoch, self.batch, self.tokens = (
            state.step,
            state.epoch,
            state.batch,
            state.tokens,
        )
        self.loss, self.accuracy_K, self.checkpoint_step = state.loss, state.accuracy_K, state.step

    def steps(self) -> Iterator[LossResult]:
        """One optimizer step per batch, from the cursor to the end."""
        with ThreadPoolExecutor(1, thread_name_prefix="batches") as pool:
            for batch in self._ahead(pool):
                if self.step >= self.total_steps:
                    return
                yield self._micro_step(batch)

    def save(self, directory: Path) -> Path:
        state = CheckpointState(
            step=self.step,
            total_steps=self.total_steps,
            epoch=self.epoch,
            batch=self.batch,
            tokens=self.tokens,
            loss=self.loss,
            accuracy_K=self.accuracy_K,
            draft=self.drafter.c,
            contract=self.contract,
            provenance=_provenance(self.config),
            finished=self.step >= self.total_steps,
        )
        self.checkpoint_step = self.step
        return checkpoint.save(
            directory, state, self.drafter, self.optimizer, self.config.train.keep_checkpoints
        )

    def _micro_step(self, batch: Batch) -> LossResult:
        train = self.config.train
        device_type = torch.device(train.device).type
        lr = learning_rate(
            self.step, self.total_steps, train.lr, train.warmup_ratio, train.schedule
        )
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        teacher = teach(batch, self._head, self.drafter)
        with torch.autocast(device_type, torch.bfloat16, enabled=train.dtype == "bfloat16"):
            result = ttt_loss(self.drafter, batch, teacher, train.loss_decay, train.normalise)
        self.optimizer.zero_grad(set_to_none=True)
        self.grad_norm = 0.0
        if sum(result.counted_K):
            torch.autograd.backward(result.loss)
            norm = torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), train.clip)
            self.grad_norm = float(norm)
        self._guard.check(self.step, result, self.grad_norm, f"step {self.checkpoint_step}")
        self.optimizer.step()
        self.lr, self.loss = lr, float(result.loss.detach())
        self.accuracy_K = [
            c / max(n, 1) for c, n in zip(result.correct_K, result.supervised_K, strict=True)
        ]
        self.step += 1
        self.tokens += batch.tokens
        self.batch += 1
        if self.batch >= self._batches_per_epoch[self.epoch]:
            self.epoch, self.batch = self.epoch + 1, 0
        return result

    def _ahead(self, pool: ThreadPoolExecutor) -> Iterator[Batch]:
        """Batches in order from the cursor, the next one being read while the current one
        trains."""
        waiting: Future[Batch] | None = None
        for epoch in range(self.epoch, self.config.train.epochs):
            for indices in self._batches(epoch)[self.batch if epoch == self.epoch else 0 :]:
                following = pool.submit(self._build, indices)
                if waiting is not None:
                    yield waiting.result()
                waiting = following
        if waiting is not None:
            yield waiting.result()

    def _build(self, indices: list[int]) -> Batch:
        train = self.config.train
        chosen = [self.lessons[i] for i in indices]
        rows = [replace(self._reader.load(x.ref), mask_T=x.mask_T) for x in chosen]
        return collate(rows, train.ttt_steps, train.mask_align, torch.float32, train.device)


@dataclass(frozen=True)
class Lesson:
    """A stored sample and its loss mask as it stands now."""

    ref: FeatureRef
    mask_T: torch.Tensor


def lessons(
    config: Config, reader: FeatureReader, masked: Mapping[str, Sequence[int]]
) -> list[Lesson]:
    """Stored samples that train: in `masked` (see data.masked_now), outside the held-out share,
    with at least one supervised draft. TrainError when none is left."""
    train, kept = config.train, []
    for ref in reader.refs:
        if ref.sample_id not in masked or is_heldout(ref.twin_id, config.eval.holdout):
            continue
        mask_T = reader.mask(ref)
        mask_T[[i for i in masked[ref.sample_id] if i < ref.num_tokens]] = False
        if bool(supervised_KT(mask_T, train.ttt_steps, train.mask_align)[0].any()):
            kept.append(Lesson(ref, mask_T))
    if not kept:
        raise TrainError(
            f"none of {len(reader.refs)} stored samples has a supervised position to train on; "
            "generate more, or look at why samples were rejected (eyas report)",
            kind="no_supervision",
        )
    return kept


def make_optimizer(drafter: Drafter, config: Config) -> torch.optim.Optimizer:
    train = config.train
    return torch.optim.AdamW(
        drafter.parameters(),
        lr=train.lr,
        betas=(0.9, 0.95),
        weight_decay=train.weight_decay,
        fused=True,
    )


def run(
    run: RunDir, config: Config, emit: Callable[[ev.Event], None], should_stop: Callable[[], bool]
) -> dict[str, Any]:
    """Train to the end, resuming from the newest checkpoint. Halted (with a checkpoint) when asked
    to stop. A training that had ended on other samples (an audit applied since) is set aside."""
    directory = target_dir(config)
    reader = FeatureReader(run.features)
    settle_threads(config.train.threads, config.train.device, reader.meta.hidden_size)
    head = load_head(directory).to(config.train.device)
    trainer = Trainer(config, reader, head, load_vocab(run.vocab), masked_now(run))
    newest = checkpoint.latest(run.checkpoints)
    if newest is not None and _is_outdated(newest, trainer):
        aside = checkpoint.set_aside(run.checkpoints)
        message = f"the samples have changed since {newest.name}: training anew, it lies in {aside}"
        emit(ev.Log(message=message, stage="train"))
    elif newest is not None:
        trainer.resume(newest)
        emit(ev.Log(message=f"training resumes at step {trainer.step}", stage="train"))
    started, first_step, first_tokens = time.monotonic(), trainer.step, trainer.tokens
    last_event = -math.inf
    for _ in trainer.steps():
        done = trainer.step >= trainer.total_steps
        if done or trainer.step % config.train.checkpoint_every == 0:
            trainer.save(run.checkpoints)
        stop = not done and should_stop()
        if stop:
            trainer.save(run.checkpoints)
        now = time.monotonic()
        if done or stop or now - last_event >= 1 / EVENTS_PER_S:
            last_event = now
            _report(
                trainer,
                emit,
                (now - started) / (trainer.step - first_step),
                now - started,
                first_tokens,
            )
        if stop:
            raise Halted(
                f"training stopped at step {trainer.step} of {trainer.total_steps}; "
                "resume goes on there"
            )
    newest = checkpoint.latest(run.checkpoints)
    return {
        "steps": trainer.step,
        "samples": len(trainer.lessons),
        "tokens": trainer.tokens,
        "loss": trainer.loss,
        **{f"accuracy_{k}": share for k, share in enumerate(trainer.accuracy_K)},
        "parameters": sum(p.numel() for p in trainer.drafter.parameters()),
        "seconds": time.monotonic() - started,
        "checkpoint": newest.name if newest else "",
    }


def _is_outdated(newest: Path, trainer: Trainer) -> bool:
    """Whether a finished training learned from other data under the same settings."""
    state = checkpoint.read_state(newest)
    now = trainer.contract
    same_settings = all(
        state.contract.get(name) == value for name, value in now.items() if name not in DATA
    )
    changed = any(state.contract.get(name) != now[name] for name in DATA)
    return state.finished and same_settings and changed


def _report(
    trainer: Trainer,
    emit: Callable[[ev.Event], None],
    step_s: float,
    elapsed_s: float,
    first_tokens: int,
) -> None:
    left = trainer.total_steps - trainer.step
    emit(
        ev.Train(
            step=trainer.step,
            total_steps=trainer.total_steps,
            loss=trainer.loss,
            accuracy_K=trainer.accuracy_K,
            lr=trainer.lr,
            grad_norm=trainer.grad_norm,
            step_s=step_s,
            eta_s=step_s * left,
            tokens_per_s=(trainer.tokens - first_tokens) / max(elapsed_s, 1e-9),
            checkpoint_step=trainer.checkpoint_step,
        )
    )
    emit(ev.StageProgress(stage="train", done=trainer.step, total=trainer.total_steps))


def _contract(
    config: Config,
    taught: list[Lesson],
    vocab: DraftVocab,
    draft: DraftConfig,
    target_sha256: str,
) -> dict[str, Any]:
    features = hashlib.sha256()
    for x in taught:
        features.update(f"{x.ref.sample_id} {x.ref.sha256} ".encode())
        features.update(x.mask_T.to(torch.uint8).numpy().tobytes())
    return {
        **{f"train.{name}": getattr(config.train, name) for name in TRAJECTORY},
        "run.seed": config.run.seed,
        "features": features.hexdigest(),
        "vocabulary": vocab.sha256,
        "target": target_sha256,
        "draft": msgspec.to_builtins(draft),
    }


def _provenance(config: Config) -> dict[str, Any]:
    return {
        "eyas": version("eyas"),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "threads": torch.get_num_threads(),
        "target_path": config.target.path or "embedded",
        "target_dtype": config.target.dtype,
        "datasets": [d.name for d in config.dataset],
    }
