"""The run directory: names of its files, atomic writes, append-only JSONL with group commit, samples as parquet.

Knows records and paths, nothing about stages. A path is spelled here and nowhere else.
"""

import os
from pathlib import Path

from core.config import Config, load


class RunDir:
    """Paths of one run (`runs/<run_id>`)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_id = path.name
        self.manifest = path / "run.json"
        self.config_toml = path / "config.toml"
        self.prompts = path / "prompts.jsonl"
        self.completions = path / "completions.jsonl"
        self.samples = path / "samples"
        self.findings = path / "findings.jsonl"
        self.audit = path / "audit.json"
        self.spend = path / "spend.jsonl"
        self.features = path / "features"
        self.vocab = path / "vocab.safetensors"
        self.checkpoints = path / "checkpoints"
        self.eval = path / "eval.json"
        self.export = path / "export"
        self.journal = path / "journal"
        self.state = path / "state"
        self.status = path / "status.json"
        self.halt_file = path / "HALT"
        self.output_log = path / "output.log"

    def load_config(self) -> Config:
        """The resolved config that the run was started with."""
        return load(self.config_toml)


def write_atomic(path: Path, data: bytes) -> None:
    """Write beside, fsync, rename: a reader sees the old file or the new one, never half of one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())
    temporary.replace(path)
