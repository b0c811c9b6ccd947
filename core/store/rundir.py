"""One run's directory: names of its files, manifest, heartbeat, creation.

Knows paths and the two small JSON files `run.json` and `status.json`, nothing about records. Every
refusal is one line, and a refused run leaves nothing behind."""

import contextlib
import os
import platform
import secrets
import shutil
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import TypeVar

import msgspec

from core.config import Config, config_hash, dump, load
from core.errors import StoreError, UsageError, printable
from core.events import API_VERSION, ENDED
from core.halting import (
    HaltError,
    boot_id,
    engine_pid,
    find_run_path,
    process_started,
    runs_dir,
    socket_path_of,
)
from core.schema import EvalReport

T = TypeVar("T")
STALE_S = 15.0
VERSIONS_OF = (
    "eyas",
    "aiohttp",
    "msgspec",
    "tiktoken",
    "numpy",
    "torch",
    "transformers",
    "pyarrow",
)


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
        self.decisions = path / "decisions.jsonl"
        self.spend = path / "spend.jsonl"
        self.features = path / "features"
        self.vocab = path / "vocab.safetensors"
        self.checkpoints = path / "checkpoints"
        self.eval = path / "eval.json"
        self.probe = path / "probe.json"
        self.export = path / "export"
        self.journal = path / "journal"
        self.state = path / "state"
        self.stages = path / "stages.json"
        self.status = path / "status.json"
        self.halt_file = path / "HALT"
        self.output_log = path / "output.log"
        self.reserve = path / ".reserve"

    def load_config(self) -> Config:
        """The resolved config that the run was started with."""
        return load(self.config_toml)


def read_halt_file(run: RunDir) -> str | None:
    """Its first line, which whoever left it wrote: printable and short. None: there is no such
    file."""
    try:
        text = run.halt_file.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None
    except OSError:
        return ""
    return printable(text.split("\n")[0][:200]).strip()


def is_gone(run: RunDir) -> bool:
    """Removed or moved. A file system that only fails to answer is not asked to say so."""
    try:
        run.path.stat()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """run.json. `pid` and `boot_id` are those of the engine that runs, or ran last."""

    v: int = 1
    run_id: str
    argv: list[str] = []
    config_hash: str = ""
    git_sha: str = ""
    versions: dict[str, str] = {}
    tokenizer: str = ""
    """A directory, a hub's `owner/name@commit`, or `embedded`."""
    tokenizer_sha256: str = ""
    """Of its vocabulary. A run's ids mean nothing under another one: resume refuses it."""
    tokenizer_files: dict[str, str] = {}
    """sha256 of each of its files that was read."""
    host: str = ""
    platform: str = ""
    boot_id: str = ""
    pid: int = 0
    pid_started: int = 0
    """Clock ticks from boot to the engine's start: tells it from a later process of the same
    number."""
    socket: str = ""
    api_version: int = API_VERSION
    created_at: float = 0.0
    started_at: float = 0.0
    lives: int = 0
    """How often an engine was started on this run."""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """status.json, written once a second: what a listing needs. `state` as in core.events.State."""

    v: int = 1
    run_id: str
    state: str = "starting"
    reason: str = ""
    seq: int = 0
    ts: float = 0.0
    pid: int = 0
    started_at: float = 0.0
    stage: str = ""
    stage_done: int = 0
    stage_total: int = 0
    prompts: int = 0
    done: int = 0
    ok: int = 0
    rejected: int = 0
    failed: int = 0
    in_flight: int = 0
    spent_usd: float = 0.0
    reserved_usd: float = 0.0
    uncertain_usd: float = 0.0
    budget_usd: float = 0.0
    exposure_usd: float | None = None
    eta_s: float | None = None
    tokens_per_s: float = 0.0
    acceptance_length: float | None = None
    exit_code: int | None = None
    consoles: int = 0


def write_atomic(path: Path, data: bytes) -> None:
    """Write beside, fsync, rename: a reader sees the old file or the new one, never half of one. A
    failure leaves nothing: on a full disk the half of a file would keep its space."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def write_status(run: RunDir, status: Status) -> None:
    """By rename, without fsync: a heartbeat lost with the machine is no loss."""
    temporary = run.status.with_name(f".status.{os.getpid()}.tmp")
    temporary.write_bytes(msgspec.json.encode(status) + b"\n")
    temporary.replace(run.status)


def _read(path: Path, kind: type[T]) -> T | None:
    """None when there is no such file, or none that can be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError):
        return None


def read_status(run: RunDir) -> Status | None:
    return _read(run.status, Status)


def observed_status(run: RunDir, now: float | None = None) -> Status:
    """The heartbeat with `state` corrected by what can be seen from here: `crashed` when an
    unfinished run's engine is dead on this boot, `stale` when its heartbeat (another host) is older
    than 15 s."""
    status = read_status(run) or Status(run_id=run.run_id)
    if status.state in ENDED:
        return status
    manifest = read_manifest(run)
    same_boot = manifest is not None and manifest.boot_id == boot_id()
    if same_boot and not engine_pid(run.path):
        return msgspec.structs.replace(
            status, state="crashed", reason="the engine is gone; eyas resume"
        )
    if not same_boot and (now if now is not None else time.time()) - status.ts > STALE_S:
        return msgspec.structs.replace(status, state="stale", reason="no heartbeat")
    return status


def write_manifest(run: RunDir, manifest: Manifest) -> None:
    write_atomic(run.manifest, msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")


def read_manifest(run: RunDir) -> Manifest | None:
    return _read(run.manifest, Manifest)


def read_eval(run: RunDir) -> EvalReport | None:
    return _read(run.eval, EvalReport)


def make_manifest(run: RunDir, config: Config, argv: list[str]) -> Manifest:
    """Everything that is needed to repeat the run, of this process on this host."""
    now = time.time()
    earlier = read_manifest(run)
    return Manifest(
        run_id=run.run_id,
        argv=argv,
        config_hash=config_hash(config),
        git_sha=_git_sha(),
        versions={"python": platform.python_version(), **_versions()},
        tokenizer_sha256=earlier.tokenizer_sha256 if earlier else "",
        host=platform.node(),
        platform=platform.platform(),
        boot_id=boot_id(),
        pid=os.getpid(),
        pid_started=process_started(os.getpid()),
        socket=str(socket_path_of(run.path)),
        created_at=earlier.created_at if earlier else now,
        started_at=now,
        lives=earlier.lives + 1 if earlier else 1,
    )


def _versions() -> dict[str, str]:
    found = {}
    for name in VERSIONS_OF:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


def _git_sha() -> str:
    """Commit of the checkout that this code runs from; empty for an installed wheel or without
    git."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return ""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def new_run_id(now: float) -> str:
    """Sorts by time; the suffix keeps two runs of one second apart."""
    return time.strftime("%Y%m%d-%H%M%S", time.localtime(now)) + "-" + secrets.token_hex(2)


def create_run(
    config: Config, base: Path, run_id: str = "", argv: list[str] | None = None
) -> RunDir:
    """Make the run directory with its resolved config and a manifest of no engine yet. Raises
    UsageError (occupied or unusable id) or StoreError (no permission, too little space); nothing is
    left behind by a refusal."""
    run_id = run_id or config.run.name or new_run_id(time.time())
    if (
        run_id in (".", "..")
        or not all(c.isalnum() or c in "._-" for c in run_id)
        or len(run_id) > 80
    ):
        raise UsageError(
            f"run id {run_id!r}: use up to 80 letters, digits, dots, dashes and underscores"
        )
    runs = base / config.run.dir
    run = RunDir(runs / run_id)
    if run.path.exists():
        raise UsageError(
            f"{run.path}: this run id is taken; `eyas resume {run_id}` continues it, "
            "or choose another run.name"
        )
    try:
        runs.mkdir(parents=True, exist_ok=True)
        check_space(runs, config.run.min_free_disk_bytes)
        staging = runs / f".{run_id}.{os.getpid()}.new"
        staging.mkdir()
        try:
            write_atomic(staging / run.config_toml.name, dump(config).encode())
            manifest = msgspec.structs.replace(
                make_manifest(run, config, argv or []), pid=0, pid_started=0, lives=0
            )
            write_manifest(RunDir(staging), manifest)
            for folder in (run.journal, run.state, run.samples):
                (staging / folder.name).mkdir()
            staging.rename(run.path)
        except OSError:
            shutil.rmtree(staging, ignore_errors=True)
            raise
    except OSError as e:
        raise StoreError(
            f"{run.path}: cannot be created ({e.strerror}); choose a writable folder with run.dir"
        ) from e
    return run


def check_space(folder: Path, needed_bytes: int) -> None:
    """Raises StoreError when the file system has less free than `needed_bytes`."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise StoreError(
            f"{folder}: {free / 1e9:.1f} GB free, {needed_bytes / 1e9:.1f} GB wanted; "
            "free some space or lower run.min_free_disk_bytes"
        )


def find_run(name: str) -> RunDir:
    """A run from a path, an id, or the unique beginning of an id. Raises UsageError."""
    try:
        return RunDir(find_run_path(name))
    except HaltError as e:
        raise UsageError(str(e)) from e


def list_runs(folder: Path | None = None) -> list[RunDir]:
    """Newest first, by the time they were created. `folder`: `$EYAS_RUNS` or ./runs by default."""
    runs = [RunDir(p.parent) for p in (folder or runs_dir()).glob("*/run.json")]
    stamped = [
        (m.created_at if (m := read_manifest(run)) else 0.0, run.run_id, run) for run in runs
    ]
    return [run for _, _, run in sorted(stamped, key=lambda row: row[:2], reverse=True)]
