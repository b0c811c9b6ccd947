"""HALT with nothing but the standard library: where the control socket is, and how to stop a run
through it; who is alive, and how our own processes are started.

Promises: importing this file loads no third-party module, so `eyas halt RUN` lands in tens of
milliseconds; a dead socket, another host or a full disk do not matter, because the HALT file is
tried first and the socket as well. Knows two lines of the control protocol and the names of three
files, nothing about the engine."""

import contextlib
import hashlib
import json
import os
import socket
import stat
import sys
import threading
from pathlib import Path
from typing import Any

RUNS_ENV = "EYAS_RUNS"
MAX_SOCKET_PATH_BYTES = 100  # sun_path holds 108 with its NUL; some systems 104
ACK_TIMEOUT_S = 2.0


class HaltError(Exception):
    """One line: what, where, what to do."""


def runs_dir() -> Path:
    """`$EYAS_RUNS`, else `./runs`."""
    return Path(os.environ.get(RUNS_ENV) or "runs")


def find_run_path(name: str) -> Path:
    """A run directory from a path, an id, or the beginning of an id that only one run has."""
    direct = Path(name)
    for candidate in (direct, runs_dir() / name):
        if name and _is_run(candidate):
            return candidate
    matches: list[Path] = []
    if name and "/" not in name:
        matches = sorted(p.parent for p in runs_dir().glob("*/run.json"))
        matches = [p for p in matches if p.name.startswith(name)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise HaltError(
            f"{name}: {len(matches)} runs in {runs_dir()} begin like this; "
            f"write more of {matches[0].name}"
        )
    raise HaltError(
        f"{name or '(no name)'}: no such run in {runs_dir()}; "
        "`eyas list` shows the runs, a path works too"
    )


def _is_run(folder: Path) -> bool:
    try:
        return (folder / "run.json").is_file()
    except (OSError, ValueError):  # a name that no file system would hold
        return False


def runtime_dir() -> Path:
    """The folder of control sockets: `$XDG_RUNTIME_DIR/eyas`, else `/tmp/eyas-<uid>`. Not created
    here."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base and len(os.fsencode(base)) < MAX_SOCKET_PATH_BYTES - 40 and Path(base).is_dir():
        return Path(base) / "eyas"
    return Path(f"/tmp/eyas-{os.getuid()}")


def private_runtime_dir() -> Path:
    """`runtime_dir()`, created 0700. Raises HaltError when it is a link, someone else's, or open to
    others."""
    path = runtime_dir()
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise HaltError(
            f"{path}: not a private folder of this user; remove it or set XDG_RUNTIME_DIR"
        )
    return path


def socket_path_of(run_path: Path) -> Path:
    """One socket a run directory: two runs of the same id in different folders do not meet."""
    resolved = run_path.resolve()
    digest = hashlib.sha256(os.fsencode(resolved)).hexdigest()[:12]
    folder = runtime_dir()
    room = MAX_SOCKET_PATH_BYTES - len(os.fsencode(folder)) - len(digest) - len("/-.sock")
    name = resolved.name.encode("ascii", "replace").decode().replace("?", "_")[: max(room, 0)]
    return folder / f"{name}-{digest}.sock"


def recorded_socket_path(run_path: Path) -> Path:
    """The path that the engine wrote down (its environment may differ from ours), else the
    rule's."""
    try:
        recorded = json.loads((run_path / "run.json").read_bytes()).get("socket")
    except (OSError, ValueError, AttributeError):
        recorded = None
    return Path(recorded) if isinstance(recorded, str) and recorded else socket_path_of(run_path)


class HaltLink:
    """A blocking connection for commands without events, as a rule halt, sever and ping alone; safe
    to use from an input thread."""

    def __init__(
        self, path: Path, client: str, timeout_s: float = ACK_TIMEOUT_S, role: str = "halt"
    ) -> None:
        self._lock = threading.Lock()
        self._next_id = 0
        self._buffer = b""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout_s)
        try:
            self._socket.connect(str(path))
            hello = {"role": role, "client": client, "api_version": 1, "from_seq": 0}
            self._send({"hello": hello})
            self.welcome: dict[str, Any] = self._receive("welcome")
        except (OSError, ValueError) as e:
            self._socket.close()
            raise HaltError(f"{path}: the run's control socket does not answer ({e})") from e

    def command(self, name: str, reason: str = "") -> dict[str, Any]:
        """Send one command and wait for its ack `{"id","ok","state","error"?}`. Raises
        HaltError."""
        with self._lock:
            self._next_id += 1
            ident = self._next_id
            try:
                self._send({"command": {"id": ident, "name": name, "reason": reason}})
                while True:
                    ack = self._receive("ack")
                    if ack.get("id") == ident:
                        return ack
            except (OSError, ValueError) as e:
                raise HaltError(f"{name}: no acknowledgement from the run ({e})") from e

    def close(self) -> None:
        self._socket.close()

    def _send(self, message: dict[str, Any]) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def _receive(self, kind: str) -> dict[str, Any]:
        while True:
            line, newline, rest = self._buffer.partition(b"\n")
            if newline:
                self._buffer = rest
                message = json.loads(line)
                if isinstance(message, dict) and isinstance(message.get(kind), dict):
                    found: dict[str, Any] = message[kind]
                    return found
                continue
            data = self._socket.recv(65_536)
            if not data:
                raise ConnectionResetError("connection closed")
            self._buffer += data


def write_halt_file(run_path: Path, reason: str = "") -> None:
    """The engine looks for this file every 200 ms."""
    (run_path / "HALT").write_text(reason + "\n", encoding="utf-8")


def halt_now(run_path: Path, sever: bool = False, reason: str = "", client: str = "halt") -> str:
    """HALT by file and by socket. Returns the state that the engine acknowledged, or "" when only
    the file could be left (another host, a hung engine). Raises HaltError when neither worked."""
    problems: list[str] = []
    try:
        write_halt_file(run_path, reason)
    except OSError as e:
        problems.append(f"HALT file: {e.strerror}")
    try:
        link = HaltLink(recorded_socket_path(run_path), client)
        try:
            ack = link.command("sever" if sever else "halt", reason)
        finally:
            link.close()
        if ack.get("ok"):
            return str(ack.get("state", ""))
        problems.append(str(ack.get("error", "refused")))
    except HaltError as e:
        problems.append(str(e))
    if len(problems) > 1:
        raise HaltError(
            f"{run_path}: " + "; ".join(problems) + "; send SIGTERM to the engine's pid"
        )
    return ""


def engine_pid(run_path: Path) -> int:
    """The engine's pid when the manifest names one that is alive on this boot of this host, else 0.
    A zombie, and another process that was given the same number since, are not alive."""
    try:
        manifest = json.loads((run_path / "run.json").read_bytes())
        pid, started = int(manifest.get("pid", 0)), int(manifest.get("pid_started", 0))
        if pid <= 0 or manifest.get("boot_id") != boot_id():
            return 0
    except (OSError, ValueError, AttributeError, TypeError):
        return 0
    now = process_started(pid)
    return pid if now and (not started or now == started) else 0


def lives_here(run_path: Path) -> bool:
    """Whether the run's last engine was of this boot of this host. Else only the HALT file reaches
    it, over a shared file system."""
    try:
        return bool(json.loads((run_path / "run.json").read_bytes())["boot_id"] == boot_id())
    except (OSError, ValueError, TypeError, KeyError):
        return False


def process_started(pid: int) -> int:
    """When a process began, in clock ticks since boot; 0 when it is gone or only waits to be
    reaped. Without /proc: 1 for any that exists."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        state, *rest = fields.rpartition(")")[2].split()
        return 0 if state in "ZX" else int(rest[18])
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return 0
    except (OSError, ValueError, IndexError):
        return 0
    try:
        os.kill(pid, 0)
    except PermissionError:
        return 1
    except OSError:
        return 0
    return 1


def python_command(*arguments: str) -> list[str]:
    """This interpreter, our package; `-P` keeps a folder named `core` in the working directory out
    of the way."""
    return [sys.executable, "-P", "-m", *arguments]


def boot_id() -> str:
    """Identity of this boot of this host: a pid means nothing on another one."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def _refuse(message: str, code: int) -> int:
    """One line, in which what a terminal would obey is a blank."""
    sys.stderr.write(f"eyas: {''.join(c if c.isprintable() else ' ' for c in message)}\n")
    return code


HELP = """\
  Stop a run at once: no new request leaves, nothing that arrived is lost.

  RUN             run id, its beginning, or a path
  --sever         cut off what is in flight as well; its cost stays uncertain
  --reason TEXT   kept in the journal
  --json          one JSON object, stable
"""


def main(arguments: list[str]) -> int:
    """`eyas halt RUN [--sever] [--reason TEXT] [--json]`; exit code 0 when it landed, 1 when not, 2
    for usage."""
    usage = "usage: eyas halt RUN [--sever] [--reason TEXT] [--json]"
    rest, names, reason = list(arguments), [], ""
    sever = as_json = False
    while rest:
        word = rest.pop(0)
        if word == "--sever":
            sever = True
        elif word == "--json":
            as_json = True
        elif word == "--reason" and rest:
            reason = rest.pop(0)
        elif word in ("-h", "--help"):
            sys.stdout.write(f"{usage}\n\n{HELP}")
            return 0
        elif word.startswith("-"):
            return _refuse(f"halt: unknown option {word}; {usage}", 2)
        else:
            names.append(word)
    if len(names) != 1:
        return _refuse(usage, 2)
    try:
        run_path = find_run_path(names[0])
    except HaltError as e:
        return _refuse(str(e), 2)
    if lives_here(run_path) and not engine_pid(run_path):
        return _refuse(f"{run_path.name}: no engine of this run is alive here; nothing to halt", 1)
    try:
        state = halt_now(run_path, sever, reason, client="eyas halt")
    except HaltError as e:
        return _refuse(str(e), 1)
    if as_json:
        sys.stdout.write(
            json.dumps({"run_id": run_path.name, "state": state or "requested"}) + "\n"
        )
    else:
        sys.stdout.write(f"{run_path.name}: {state or 'HALT file left; no acknowledgement'}\n")
    return 0
