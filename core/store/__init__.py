"""The run directory: names of its files, atomic writes, append-only JSONL with group commit,
samples as parquet.

Knows records and paths, nothing about stages. A path is spelled in `rundir` and nowhere else.
"""

from core.store.linefile import LineFile, Reserve, mend_tail
from core.store.lines import (
    Appender,
    CorruptLine,
    encode_line,
    read_at,
    read_jsonl,
    read_placed,
)
from core.store.lock import only_one
from core.store.rundir import (
    Manifest,
    RunDir,
    Status,
    create_run,
    find_run,
    list_runs,
    make_manifest,
    new_run_id,
    observed_status,
    read_eval,
    read_manifest,
    read_status,
    write_atomic,
    write_manifest,
    write_status,
)
from core.store.samples import (
    count_samples,
    find_samples,
    holding,
    read_samples,
    write_samples,
)

__all__ = [
    "Appender",
    "CorruptLine",
    "LineFile",
    "Manifest",
    "Reserve",
    "RunDir",
    "Status",
    "count_samples",
    "create_run",
    "encode_line",
    "find_run",
    "find_samples",
    "holding",
    "list_runs",
    "make_manifest",
    "mend_tail",
    "new_run_id",
    "observed_status",
    "only_one",
    "read_at",
    "read_eval",
    "read_jsonl",
    "read_manifest",
    "read_placed",
    "read_samples",
    "read_status",
    "write_atomic",
    "write_manifest",
    "write_samples",
    "write_status",
]
