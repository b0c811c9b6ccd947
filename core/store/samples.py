"""Samples as parquet (zstd): scalar columns for tables, nested evidence as JSON strings.

The file is replaced whole by rename: samples are a function of completions.jsonl and are never
appended to."""

import json
import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from core.errors import StoreError, boundary
from core.schema import Sample, Segment, ToolCall
from core.store.lines import encode_line
from core.store.rundir import RunDir

if TYPE_CHECKING:
    import pyarrow as pa

ROWS_PER_FILE = 20_000
ROWS_PER_BATCH = 1_024
MOST_FOUND = 16
JSON_COLUMNS = {"calls": list[ToolCall], "segments": list[Segment], "habits": dict[str, bool]}
_EMPTY: dict[str, Any] = {
    "prompt_id": "",
    "twin_id": "",
    "dataset": "",
    "arm": "declared",
    "backend": "",
    "provider": None,
    "token_ids": [],
    "verdict": "unverifiable",
}
_ALWAYS = ("sample_id", "prompt_len", "masked", "dropped")


def _schema() -> "pa.Schema":
    import pyarrow as pa  # half a second to load: most readers of runs never open a sample

    text, number = pa.string(), pa.int64()
    return pa.schema(
        [
            ("v", pa.int32()),
            ("sample_id", text),
            ("prompt_id", text),
            ("twin_id", text),
            ("dataset", text),
            ("arm", text),
            ("backend", text),
            ("provider", text),
            ("token_ids", pa.list_(pa.int32())),
            ("prompt_len", number),
            ("verdict", text),
            ("error_class", text),
            ("hypothesis", text),
            ("flags", pa.list_(text)),
            ("calls", text),
            ("segments", text),
            ("finish_reason", text),
            ("rebuilt_tokens", number),
            ("billed_tokens", number),
            ("prompt_tokens_billed", number),
            ("cost_usd", pa.float64()),
            ("masked", pa.list_(pa.int32())),
            ("dropped", text),
            ("reasoning_off", number),
            ("habits", text),
        ]
    )


def write_samples(run: RunDir, samples: Iterable[Sample]) -> int:
    """Write all samples of a run, replacing earlier ones; returns their number. Same samples, same
    bytes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = _schema()
    run.samples.mkdir(exist_ok=True)
    written: list[tuple[str, str]] = []
    count, rows, writer = 0, 0, None

    def flush(batch: list[dict[str, Any]]) -> None:
        nonlocal writer, rows
        if writer is None:
            name = f"{len(written):06d}.parquet"
            temporary = f".{name}.{os.getpid()}.tmp"
            written.append((temporary, name))
            writer = pq.ParquetWriter(run.samples / temporary, schema, compression="zstd")
        writer.write_table(pa.Table.from_pylist(batch, schema=schema))
        rows += len(batch)
        if rows >= ROWS_PER_FILE:
            writer.close()
            writer, rows = None, 0

    batch: list[dict[str, Any]] = []
    for sample in samples:
        count += 1
        batch.append(_row(sample))
        if len(batch) >= ROWS_PER_BATCH:
            flush(batch)
            batch = []
    if batch or not written:
        flush(batch)
    if writer is not None:
        writer.close()
    for temporary, name in written:
        (run.samples / temporary).replace(run.samples / name)
    kept = {name for _, name in written}
    for path in run.samples.glob("*.parquet"):
        if path.name not in kept:
            path.unlink()
    return count


def read_samples(run: RunDir, columns: list[str] | None = None) -> Iterator[Sample]:
    """All samples in file order. With `columns`, the fields left out hold their empty values (what
    the mask and `trainable` rest on beside the verdict is always read). Raises StoreError for a
    file that is damaged or of another version."""
    import pyarrow.parquet as pq

    wanted = None if columns is None else sorted({*columns, *_ALWAYS})
    for path in sorted(run.samples.glob("*.parquet")):
        unreadable = boundary(StoreError, f"{path}: rebuild it (eyas stage reconstruct)")
        with unreadable, pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=ROWS_PER_BATCH, columns=wanted):
                for row in batch.to_pylist():
                    yield _sample(row)


def find_samples(run: RunDir, column: str, value: str, prefix: bool = False) -> list[Sample]:
    """Whole samples by a text column, or by its beginning, in file order, MOST_FOUND of them at
    most. Only that column is read
    of the row groups that hold none: one of 83,000 samples takes tens of milliseconds. Raises
    StoreError."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    found: list[Sample] = []
    for path in sorted(run.samples.glob("*.parquet")):
        unreadable = boundary(StoreError, f"{path}: rebuild it (eyas stage reconstruct)")
        with unreadable, pq.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                texts = file.read_row_group(group, columns=[column])[column]
                hits = pc.starts_with(texts, value) if prefix else pc.equal(texts, value)
                if not pc.any(hits).as_py():
                    continue
                rows = file.read_row_group(group).filter(hits).slice(0, MOST_FOUND - len(found))
                # Ids by numpy: pyarrow's own way holds the interpreter for a second on 2 MB.
                ids = [row.values.to_numpy().tolist() for row in rows["token_ids"]]
                plain = rows.drop_columns("token_ids").to_pylist()
                found += [
                    _sample({**row, "token_ids": of_row})
                    for row, of_row in zip(plain, ids, strict=True)
                ]
                if len(found) >= MOST_FOUND:
                    return found
    return found


def count_samples(run: RunDir) -> int:
    """From the footers of the files."""
    import pyarrow.parquet as pq

    paths = run.samples.glob("*.parquet")
    with boundary(StoreError, f"{run.samples}: rebuild it (eyas stage reconstruct)"):
        return sum(pq.read_metadata(path).num_rows for path in paths)


def holding(run: RunDir, token_id: int, arm: str) -> list[str] | None:
    """Prompt ids of an arm's samples whose completion holds a token, in file order; None when the
    arm has no sample at all. Looks through the id column, builds no sample. Raises StoreError."""
    import numpy as np
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    found: list[str] = []
    seen = False
    columns = ["prompt_id", "arm", "prompt_len", "token_ids"]
    for path in sorted(run.samples.glob("*.parquet")):
        unreadable = boundary(StoreError, f"{path}: rebuild it (eyas stage reconstruct)")
        with unreadable, pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=ROWS_PER_BATCH, columns=columns):
                rows = batch.filter(pc.equal(batch["arm"], arm))
                seen = seen or rows.num_rows > 0
                ids = rows["token_ids"]
                begins = ids.offsets.to_numpy()
                hits = np.flatnonzero(ids.values.to_numpy(zero_copy_only=False) == token_id)
                of_row = np.searchsorted(begins, hits, side="right") - 1
                inside = hits - begins[of_row] >= rows["prompt_len"].to_numpy()[of_row]
                names = rows["prompt_id"]
                found += [names[int(i)].as_py() for i in np.unique(of_row[inside])]
    return found if seen else None


def _row(sample: Sample) -> dict[str, Any]:
    row = msgspec.structs.asdict(sample)
    for name in JSON_COLUMNS:
        row[name] = encode_line(row[name])[:-1].decode()
    for name, value in row.items():
        if isinstance(value, str):
            row[name] = _storable(value)
    row["flags"] = [_storable(flag) for flag in sample.flags]
    return row


def _storable(text: str) -> str:
    """Parquet holds UTF-8: a lone surrogate from a hostile reply is shown as its escape."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _sample(row: dict[str, Any]) -> Sample:
    for name, type_ in JSON_COLUMNS.items():
        if isinstance(row.get(name), str):
            row[name] = msgspec.convert(json.loads(row[name]), type_)
    fields = {**_EMPTY, **row}
    return Sample(**fields)
