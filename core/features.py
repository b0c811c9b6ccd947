"""Hidden-state shards: what the extract stage writes and the train and evaluate stages read.

A shard is a safetensors file with many samples; `index.jsonl` holds one FeatureRef a line. A shard
appears by rename and is never written again; its refs live in its own metadata too, so the index
can always be completed after a kill; of several refs of a sample the last one counts. Rows equal
ids, always: a sample whose states are shorter is refused, never padded. Knows nothing about models;
`meta.json` records which layers were taken, in both conventions in use."""

# T positions, H hidden size, C = 4 captured states: low, mid, high aux layer output and last layer
# output before the final norm. A aux layers (3).

import errno
import hashlib
import os
import shutil
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from core.errors import CaptureError, DiskFull, StoreError, boundary
from core.schema import FeatureRef
from core.store import write_atomic

CAPTURED = 4
OPEN_SHARDS = 64
BYTES_PER_TOKEN_BESIDE_STATES = 4 + 1 + 4 + 4
"""token id int32, mask byte, log-probability float32, argmax int32."""
_PARTS = ("states", "ids", "mask", "logprob", "top1")


class FeatureMeta(msgspec.Struct, frozen=True, kw_only=True):
    """What every shard of a folder has in common. A resume with another meta is refused.

    `aux_layers`: 0-based layers whose OUTPUT is stored. `aux_boundaries`: the same states named as
    inputs (HF hidden_states index, vLLM): always one more (case C66)."""

    v: int = 1
    aux_layers: list[int]
    aux_boundaries: list[int]
    convention: str = "aux_layers: output of 0-based layer; aux_boundaries: hidden_states index"
    last_state: str = "pre_norm"
    num_layers: int
    hidden_size: int
    dtype: str
    max_length: int
    target_sha256: str


@dataclass(frozen=True)
class FeatureRow:
    """One sample with its states. `logprob_T[i]` is log p(token i) under the target, 0 on prompt
    tokens; `top1_T[i]` is the argmax of the target's logits at position i (its choice for token i +
    1), -1 where the position neither precedes nor is a completion token."""

    sample_id: str
    twin_id: str
    dataset: str
    prompt_len: int
    ids_T: torch.Tensor
    mask_T: torch.Tensor
    states_TCH: torch.Tensor
    logprob_T: torch.Tensor
    top1_T: torch.Tensor

    @property
    def length(self) -> int:
        return int(self.ids_T.numel())


def default_aux_layers(num_layers: int) -> list[int]:
    """[1, n//2 - 1, n - 4]: low, middle, high (SpecForge resolve_eagle_capture_layers; ModelOpt the
    same)."""
    return [1, num_layers // 2 - 1, num_layers - 4]


def check_aux_layers(layers: Sequence[int], num_layers: int) -> list[int]:
    """Three distinct ascending layers in range, or CaptureError."""
    chosen = list(layers) or default_aux_layers(num_layers)
    ordered = sorted(set(chosen)) == chosen
    if len(chosen) != 3 or not ordered or chosen[0] < 0 or chosen[-1] >= num_layers:
        raise CaptureError(
            f"aux layers {chosen} of a target with {num_layers} layers: need three distinct "
            f"ascending 0-based layers below {num_layers}; set extract.aux_layers",
            kind="aux_layers",
        )
    return chosen


def to_boundaries(aux_layers: Sequence[int]) -> list[int]:
    """Output of 0-based layer i = input of layer i + 1 = hidden_states[i + 1]."""
    return [layer + 1 for layer in aux_layers]


def bytes_per_token(hidden_size: int, dtype: torch.dtype) -> int:
    return CAPTURED * hidden_size * dtype.itemsize + BYTES_PER_TOKEN_BESIDE_STATES


def crc_of(ids: Any) -> int:
    """Checksum of token ids: states belong to these and to no others."""
    return zlib.crc32(np.asarray(ids, dtype="<i4").tobytes())


def check_rows(sample_id: str, num_ids: int, num_rows: int) -> None:
    """Rows must equal ids (case C67: a prefix cache drops the cached ones)."""
    if num_rows != num_ids:
        raise CaptureError(
            f"{sample_id}: {num_rows} hidden rows for {num_ids} ids; "
            "switch the server's prefix cache and chunked prefill off",
            kind="hidden_rows_mismatch",
        )


def check_finite(sample_id: str, states_TCH: torch.Tensor, layer_names: Sequence[str]) -> None:
    """CaptureError that names the first layer and position with a NaN or an infinity."""
    finite_TC = torch.isfinite(states_TCH).all(-1)
    if bool(finite_TC.all()):
        return
    position, captured = (~finite_TC).nonzero()[0].tolist()
    raise CaptureError(
        f"{sample_id}: hidden state of {layer_names[captured]} is not finite at position "
        f"{position}; extract in float32 or bfloat16",
        kind="non_finite",
    )


def check_same_states(stored_LCH: torch.Tensor, seen_LCH: torch.Tensor, tolerance: float) -> float:
    """The serving self-test of case C66: states that an engine captured against stored ones.

    Returns the largest absolute difference relative to the stored states' own largest value;
    CaptureError above `tolerance`, with the first differing state in the message."""
    check_rows("self-test", stored_LCH.shape[0], seen_LCH.shape[0])
    worst = 0.0
    for captured in range(stored_LCH.shape[1]):
        stored, seen = stored_LCH[:, captured].double(), seen_LCH[:, captured].double()
        gap = float((stored - seen).abs().max() / stored.abs().max().clamp_min(1e-30))
        if not gap <= tolerance:
            raise CaptureError(
                f"captured state {captured} differs from the training file by {gap:.3g} (tolerance "
                f"{tolerance:g}); check the aux layer ids and their convention (output of a layer "
                "against input of a layer)",
                kind="states_mismatch",
            )
        worst = max(worst, gap)
    return worst


class FeatureWriter:
    """Collects rows and writes a shard whenever `shard_bytes` are reached. `done`: the finished
    samples, each with the checksum of its ids.

    Opening repairs: a torn index line is cut off, and shards that were renamed but not indexed are
    indexed."""

    def __init__(self, directory: Path, meta: FeatureMeta, shard_bytes: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._shard_bytes = directory, shard_bytes
        self._rows: list[FeatureRow] = []
        self._pending_bytes = 0
        _settle_meta(directory, meta)
        for leftover in directory.glob(".*.tmp"):
            leftover.unlink()
        refs = _complete_index(directory)
        self.done = {ref.sample_id: ref.ids_crc for ref in refs}
        self.bytes_written = sum(p.stat().st_size for p in directory.glob("*.safetensors"))
        self._next = 1 + max((int(p.stem) for p in directory.glob("*.safetensors")), default=0)

    def holds(self, sample_id: str, ids: Any) -> bool:
        """Whether the states of exactly these ids are stored."""
        return self.done.get(sample_id) == crc_of(ids)

    def add(self, row: FeatureRow) -> None:
        """Take one sample; it takes the place of the same sample with other ids. One with the same
        ids is an error: it should not have been extracted."""
        check_rows(row.sample_id, row.length, row.states_TCH.shape[0])
        if self.holds(row.sample_id, row.ids_T):
            raise StoreError(
                f"{row.sample_id}: hidden states are stored already", kind="duplicate_features"
            )
        self.done[row.sample_id] = crc_of(row.ids_T)
        self._rows.append(row)
        self._pending_bytes += row.states_TCH.numel() * row.states_TCH.element_size()
        if self._pending_bytes >= self._shard_bytes:
            self.flush()

    def flush(self) -> None:
        """Write what is pending as one shard: temporary file, fsync, rename, then the index
        lines."""
        if not self._rows:
            return
        name = f"{self._next:06d}.safetensors"
        tensors: dict[str, torch.Tensor] = {}
        refs = []
        for row in self._rows:
            parts = _pack(row)
            refs.append(_ref(row, name, parts))
            tensors.update({f"{row.sample_id}/{part}": t for part, t in parts.items()})
        temporary = self._directory / f".{name}.tmp"
        with disk_boundary(self._directory / name):
            save_file(tensors, temporary, metadata={"refs": msgspec.json.encode(refs).decode()})
            fsync(temporary)
            temporary.replace(self._directory / name)
            _append_lines(self._directory / "index.jsonl", refs)
        self.bytes_written += (self._directory / name).stat().st_size
        self._next += 1
        self._rows, self._pending_bytes = [], 0


class FeatureReader:
    """Memory-mapped access to finished shards. `refs`: one a sample, in index order."""

    def __init__(self, directory: Path) -> None:
        meta = directory / "meta.json"
        if not meta.exists():
            raise StoreError(
                f"{directory}: no hidden states; run the extract stage first", kind="no_features"
            )
        with boundary(StoreError, str(meta)):
            self.meta = msgspec.json.decode(meta.read_bytes(), type=FeatureMeta)
        newest = {ref.sample_id: ref for ref in _read_index(directory / "index.jsonl")}
        self.refs = list(newest.values())
        self._directory = directory
        self._handles: OrderedDict[str, Any] = OrderedDict()

    def load(self, ref: FeatureRef, verify: bool = False) -> FeatureRow:
        """The row of one ref. `verify` compares the checksum too (StoreError when the bytes have
        changed)."""
        shard = self._shard(ref.shard)
        with boundary(StoreError, f"{ref.shard}: {ref.sample_id}"):
            parts = {part: shard.get_tensor(f"{ref.sample_id}/{part}") for part in _PARTS}
        if verify and _checksum(parts) != ref.sha256:
            raise StoreError(
                f"{self._directory / ref.shard}: {ref.sample_id} has changed on disk; "
                "remove the shard and run the extract stage again",
                kind="checksum",
            )
        check_rows(ref.sample_id, ref.num_tokens, parts["states"].shape[0])
        return FeatureRow(
            sample_id=ref.sample_id,
            twin_id=ref.twin_id,
            dataset=ref.dataset,
            prompt_len=ref.prompt_len,
            ids_T=parts["ids"].long(),
            mask_T=parts["mask"].bool(),
            states_TCH=parts["states"],
            logprob_T=parts["logprob"],
            top1_T=parts["top1"].long(),
        )

    def mask(self, ref: FeatureRef) -> torch.Tensor:
        """The loss mask alone."""
        with boundary(StoreError, f"{ref.shard}: {ref.sample_id}"):
            mask_T: torch.Tensor = self._shard(ref.shard).get_tensor(f"{ref.sample_id}/mask").bool()
        return mask_T

    def _shard(self, name: str) -> Any:
        if name in self._handles:
            self._handles.move_to_end(name)
            return self._handles[name]
        with _intact(self._directory / name):
            handle = safe_open(self._directory / name, framework="pt")
        self._handles[name] = handle
        if len(self._handles) > OPEN_SHARDS:
            self._handles.popitem(last=False)
        return handle


def refuse_if_too_big(directory: Path, needed_bytes: int, keep_free_bytes: int) -> None:
    """DiskFull before the first shard rather than after an hour."""
    free = shutil.disk_usage(directory).free
    if needed_bytes + keep_free_bytes > free:
        raise DiskFull(
            f"{directory}: hidden states need {needed_bytes / 1e9:.2f} GB and "
            f"{keep_free_bytes / 1e9:.2f} GB must stay free, but {free / 1e9:.2f} GB are; "
            "make room, or lower extract.max_length or dataset limits"
        )


def _pack(row: FeatureRow) -> dict[str, torch.Tensor]:
    return {
        "states": row.states_TCH.contiguous(),
        "ids": row.ids_T.to(torch.int32).contiguous(),
        "mask": row.mask_T.to(torch.uint8).contiguous(),
        "logprob": row.logprob_T.to(torch.float32).contiguous(),
        "top1": row.top1_T.to(torch.int32).contiguous(),
    }


def _ref(row: FeatureRow, shard: str, parts: dict[str, torch.Tensor]) -> FeatureRef:
    return FeatureRef(
        sample_id=row.sample_id,
        twin_id=row.twin_id,
        dataset=row.dataset,
        shard=shard,
        num_tokens=row.length,
        prompt_len=row.prompt_len,
        supervised=int(row.mask_T.sum()),
        sha256=_checksum(parts),
        ids_crc=crc_of(row.ids_T),
    )


def _checksum(parts: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for part in _PARTS:
        digest.update(parts[part].contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _settle_meta(directory: Path, meta: FeatureMeta) -> None:
    path = directory / "meta.json"
    if not path.exists():
        write_atomic(path, msgspec.json.format(msgspec.json.encode(meta)))
        return
    with boundary(StoreError, str(path)):
        stored = msgspec.json.decode(path.read_bytes(), type=FeatureMeta)
    for field in meta.__struct_fields__:
        if getattr(stored, field) != getattr(meta, field):
            raise CaptureError(
                f"{path}: {field} was {getattr(stored, field)} and is now {getattr(meta, field)}; "
                "remove the features folder, or undo the change",
                kind="features_meta_changed",
            )


def _complete_index(directory: Path) -> list[FeatureRef]:
    """The refs of all finished shards; shards are the truth, the index is brought up to them."""
    index = directory / "index.jsonl"
    if index.exists():
        data = index.read_bytes()
        if not data.endswith(b"\n") and data:
            write_atomic(index, data[: data.rfind(b"\n") + 1])
    refs = list(_read_index(index))
    known = {(ref.sample_id, ref.shard) for ref in refs}
    for path in sorted(directory.glob("*.safetensors")):
        with _intact(path), safe_open(path, framework="pt") as shard:
            stored = msgspec.json.decode(shard.metadata()["refs"], type=list[FeatureRef])
        missing = [ref for ref in stored if (ref.sample_id, ref.shard) not in known]
        if missing:
            _append_lines(index, missing)
            refs += missing
    return refs


def _intact(path: Path) -> AbstractContextManager[None]:
    """For opening a shard; whoever reads why not, reads how its states come back as well."""
    return boundary(
        StoreError,
        f"{path}: damaged; `eyas stage extract --run {path.parent.parent}` makes all states anew",
    )


def _read_index(path: Path) -> Iterator[FeatureRef]:
    if not path.exists():
        return
    decode = msgspec.json.Decoder(FeatureRef).decode
    with path.open("rb") as f:
        for number, line in enumerate(f, 1):
            if not line.endswith(b"\n"):
                return  # torn by a kill; the next writer restores it from the shard
            with boundary(StoreError, f"{path}:{number}"):
                ref = decode(line)
            yield ref


def _append_lines(path: Path, refs: list[FeatureRef]) -> None:
    lines = b"".join(msgspec.json.encode(ref) + b"\n" for ref in refs)
    with path.open("ab") as f:
        f.write(lines)
        f.flush()
        os.fsync(f.fileno())


def fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def disk_boundary(path: Path) -> Iterator[None]:
    """Tensors that cannot be written: DiskFull for want of space, StoreError for any other fault.
    safetensors has an error of its own for both."""
    try:
        yield
    except (OSError, SafetensorError) as e:
        full = getattr(e, "errno", None) == errno.ENOSPC or "No space left" in str(e)
        kind, remedy = (DiskFull, "free space") if full else (StoreError, "mend it")
        raise kind(f"{path}: not written ({e}); {remedy}, then resume") from e
