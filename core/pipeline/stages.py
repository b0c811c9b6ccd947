"""The order of the stages, what each reads and leaves, and which are finished already.

Promises: a stage is skipped exactly when its inputs and its outputs are byte for byte those of its
last success. Knows names, files and config sections; what a stage does is its own module's
business."""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from core import events as ev
from core import gpu
from core.config import Config
from core.errors import UsageError
from core.store import RunDir, write_atomic

HASH_WHOLE_BYTES = 64 << 20


class Stage(NamedTuple):
    """`sections`: config that the result depends on. `needs`: stages whose outputs it reads.
    `files`: its own outputs, as glob patterns in the run directory."""

    name: str
    module: str
    sections: tuple[str, ...]
    needs: tuple[str, ...]
    files: tuple[str, ...]


ORDER = (
    Stage("generate", "", ("target", "dataset", "generate"), (), ("completions.jsonl",)),
    Stage(
        "reconstruct", "core.pipeline.rebuild", ("target",), ("generate",), ("samples/*.parquet",)
    ),
    Stage(
        "audit",
        "core.pipeline.auditing",
        ("target", "audit", "tripwires"),
        ("reconstruct",),
        ("findings.jsonl", "audit.json"),
    ),
    Stage(
        "vocab",
        "core.drafter.vocab",
        ("target", "draft", "eval", "extract"),
        ("reconstruct",),
        ("vocab.safetensors",),
    ),
    Stage("extract", "core.extract", ("target", "extract"), ("reconstruct",), ("features/*",)),
    Stage(
        "train",
        "core.drafter.train",
        ("target", "draft", "train", "eval"),
        ("reconstruct", "vocab", "extract"),
        ("checkpoints/**/*",),
    ),
    Stage(
        "evaluate",
        "core.drafter.evaluate",
        ("target", "eval"),
        ("reconstruct", "extract", "train"),
        ("eval.json",),
    ),
    Stage("export", "core.drafter.export", ("target", "export"), ("train",), ("export/**/*",)),
)
BY_NAME = {stage.name: stage for stage in ORDER}
assert tuple(BY_NAME) == ev.STAGES


def stage_named(name: str) -> Stage:
    """Raises UsageError."""
    if name not in BY_NAME:
        raise UsageError(f"stage {name!r}: not known; the stages are {', '.join(BY_NAME)}")
    return BY_NAME[name]


def selected(config: Config) -> list[Stage]:
    """The stages of a run, in order."""
    return [s for s in ORDER if not config.run.stages or s.name in config.run.stages]


def refuse_what_is_missing(config: Config, stages: Iterable[Stage]) -> None:
    """Raises UsageError: before the first paid request, not when the replies wait for a GPU or for
    the target's weights."""
    target = Path(config.target.path)
    for stage in stages:
        reads = stage.name in ("extract", "train", "evaluate", "export")
        if reads and config.target.kind == "hf" and not (target / "config.json").is_file():
            raise UsageError(
                f"target.path {target}: no config.json of a model; name its folder, or leave stage "
                f"{stage.name} and those after it out of run.stages"
            )
        section = {"extract": "target", "evaluate": "target", "train": "train"}.get(stage.name)
        device = getattr(config, section).device if section else "cpu"
        if why := gpu.why_missing(device):
            raise UsageError(
                f'{section}.device = "{device}": {why}; name another, or leave stage {stage.name} '
                "out of run.stages"
            )


class Marker(msgspec.Struct, frozen=True, kw_only=True):
    """One finished stage."""

    inputs: str
    outputs: str
    finished_at: float
    seconds: float
    summary: dict[str, Any] = {}


class Markers:
    """stages.json: the last success of each stage."""

    def __init__(self, run: RunDir, config: Config) -> None:
        self._run = run
        self._config = config
        try:
            self.done = msgspec.json.decode(run.stages.read_bytes(), type=dict[str, Marker])
        except (OSError, msgspec.MsgspecError):
            self.done = {}

    def finished(self, stage: Stage) -> Marker | None:
        """The marker, when nothing that it depends on has changed since."""
        marker = self.done.get(stage.name)
        if marker is None or marker.inputs != self.inputs(stage):
            return None
        return marker if marker.outputs == self.outputs(stage) else None

    def finish(self, stage: Stage, now: float, seconds: float, summary: dict[str, Any]) -> None:
        self.done[stage.name] = Marker(
            inputs=self.inputs(stage),
            outputs=self.outputs(stage),
            finished_at=now,
            seconds=seconds,
            summary=summary,
        )
        write_atomic(
            self._run.stages, msgspec.json.format(msgspec.json.encode(self.done), indent=1)
        )

    def inputs(self, stage: Stage) -> str:
        digest = hashlib.sha256(stage.name.encode())
        for section in stage.sections:
            digest.update(msgspec.json.encode(getattr(self._config, section)))
        digest.update(str(self._config.run.seed).encode())
        files = ["prompts.jsonl"] if not stage.needs else []
        for need in stage.needs:
            files.extend(BY_NAME[need].files)
        digest.update(content_digest(self._run.path, files).encode())
        return digest.hexdigest()

    def outputs(self, stage: Stage) -> str:
        return content_digest(self._run.path, list(stage.files))


def clear_outputs(run: RunDir, stage: Stage) -> None:
    """Remove what a stage made, so that it is made again. Replies were paid for: those of generate
    stay, and are passed over by id."""
    if stage.name == "generate":
        return
    for path in list(_files(run.path, list(stage.files))):
        path.unlink()


def content_digest(root: Path, patterns: list[str]) -> str:
    """SHA-256 over names and contents. Tensor files above 64 MB count by name and size: their own
    indexes hold their hashes, and reading terabytes to skip a stage would take longer than the
    stage."""
    digest = hashlib.sha256()
    for path in _files(root, patterns):
        size = path.stat().st_size
        digest.update(f"{path.relative_to(root)}\0{size}\0".encode())
        if size <= HASH_WHOLE_BYTES or path.suffix != ".safetensors":
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _files(root: Path, patterns: list[str]) -> Iterator[Path]:
    found = {p for pattern in patterns for p in root.glob(pattern)}
    for path in sorted(found):
        if (
            path.is_file()
            and not path.name.startswith(".")
            and not path.name.endswith((".tmp", ".torn"))
        ):
            yield path
