"""One strict TOML, read and checked: an unknown key names the nearest one. Its sections and their
fields: core/config_sections.py.

Paths are relative to the TOML's folder.
"""

import difflib
import hashlib
import math
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args, get_origin

import msgspec
import tomli_w

from core.config_sections import (
    Audit,
    Backend,
    Config,
    Console,
    Dataset,
    OpenAI,
    OpenRouter,
    Tripwires,
)
from core.errors import ConfigError, printable

__all__ = [
    "Audit",
    "Backend",
    "Config",
    "Console",
    "Dataset",
    "OpenAI",
    "OpenRouter",
    "Tripwires",
    "config_hash",
    "dump",
    "load",
    "parse",
]

OPENROUTER = "https://openrouter.ai/api/v1"
TARGET_DIR = Path(__file__).parent / "embedded" / "target"
"""The embedded model: the layout of a Kimi checkpoint."""


def load(path: Path, overrides: list[str] | None = None) -> Config:
    """Read and check one TOML, then apply `section.key=value` overrides (values in TOML syntax,
    bare strings allowed)."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as e:
        raise ConfigError(
            f"{path}: cannot be read ({e.strerror}); give the path of a config file"
        ) from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path}: not TOML: {e}; mend the file") from e
    for item in overrides or []:
        _override(data, item)
    return parse(data, str(path))


def parse(data: dict[str, Any], where: str) -> Config:
    _refuse_unknown(data, Config, "", where)
    _refuse_unbounded(data, "", where)
    try:
        config = msgspec.convert(data, Config)
    except msgspec.ValidationError as e:
        raise ConfigError(f"{where}: {_explained(str(e))}") from e
    _check(config, where)
    if config.target.kind == "embedded" or config.generate.openrouter.base_url:
        return config
    replace = msgspec.structs.replace
    openrouter = replace(config.generate.openrouter, base_url=OPENROUTER)
    return replace(config, generate=replace(config.generate, openrouter=openrouter))


def dump(config: Config) -> str:
    """The resolved config as TOML."""
    return tomli_w.dumps(msgspec.to_builtins(config))


def config_hash(config: Config) -> str:
    return hashlib.sha256(dump(config).encode()).hexdigest()[:16]


def _override(data: dict[str, Any], item: str) -> None:
    key, sep, value = item.partition("=")
    parts = key.strip().split(".")
    if not sep or not all(parts):
        raise ConfigError(f"--set {item}: write section.key=value")
    try:
        parsed = tomllib.loads(f"v = {value}")["v"]
    except tomllib.TOMLDecodeError:
        parsed = value
    if not _is_text(item):
        raise ConfigError(f"--set {printable(item)}: not UTF-8; type it anew")
    node = data
    for part in parts[:-1]:
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            raise ConfigError(f"--set {item}: {part} is not a section")
    node[parts[-1]] = parsed


def _is_text(text: str) -> bool:
    """Bytes of a command line that are not UTF-8 come as lone surrogates, which no file takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse_unknown(data: Any, kind: type, prefix: str, where: str) -> None:
    """msgspec names the first unknown key; people want the nearest known one as well."""
    if not isinstance(data, dict):
        return
    fields = {f.encode_name: f.type for f in msgspec.structs.fields(kind)}
    for key, value in data.items():
        if key not in fields:
            near = difflib.get_close_matches(key, list(fields), n=1)
            hint = f"; did you mean {prefix}{near[0]}?" if near else f"; known: {', '.join(fields)}"
            raise ConfigError(f"{where}: unknown key {prefix}{key}{hint}")
        inner = fields[key]
        if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
            _refuse_unknown(value, inner, f"{prefix}{key}.", where)
        elif key == "dataset" and isinstance(value, list):
            for row in value:
                _refuse_unknown(row, Dataset, "dataset.", where)


def _explained(message: str) -> str:
    """msgspec's message with the key first, as it is written in the file, and with the words that a
    choice knows."""
    said, _, path = message.partition(" - at `$")
    key = path.strip(".`")
    if not key:
        return message
    if "regex" in said:  # Device is the only type that has one
        return f"{key}: not a device; use cpu, mps, cuda or one of several, such as cuda:1"
    if not said.startswith("Invalid enum value"):
        return f"{key}: {said[0].lower()}{said[1:]}"
    kind: Any = Config
    for name in re.findall(r"[a-z_]+", key):
        kind = {f.encode_name: f.type for f in msgspec.structs.fields(kind)}[name]
        kind = get_args(kind)[0] if get_origin(kind) is list else kind
    known = [word for word in get_args(kind) if word]
    return f"{key}: {said.removeprefix('Invalid enum value ')} is not known; use {', '.join(known)}"


def _refuse_unbounded(data: Any, key: str, where: str) -> None:
    """`inf` passes every lower bound, and JSON can hold neither it nor `nan`."""
    if isinstance(data, float) and not math.isfinite(data):
        raise ConfigError(f"{where}: {key} = {data}: not a finite number; write one")
    pairs: Iterable[tuple[object, Any]] = ()
    if isinstance(data, dict):
        pairs = data.items()
    elif isinstance(data, list):
        pairs = enumerate(data)
    for name, value in pairs:
        _refuse_unbounded(value, f"{key}.{name}".lstrip("."), where)


def _check_addresses(config: Config, where: str) -> None:
    """Addresses are sent, shown and stored as they are."""
    generate = config.generate
    named = [
        ("openrouter.base_url", generate.openrouter.base_url),
        ("openrouter.app_url", generate.openrouter.app_url),
        ("openai.base_url", generate.openai.base_url),
        *(("sglang.urls", url) for url in generate.sglang.urls),
    ]
    for key, url in named:
        if not url.isprintable():
            raise ConfigError(f"{where}: {key} holds a control character; write the address anew")
        if "@" in url.partition("//")[2].partition("/")[0]:
            raise ConfigError(
                f"{where}: {key} holds a user name or password, which a run would store and show; "
                "name the key's environment variable with api_key_env"
            )


def _check(config: Config, where: str) -> None:
    _check_addresses(config, where)
    names = [d.name for d in config.dataset]
    if twice := sorted({n for n in names if names.count(n) > 1}):
        raise ConfigError(f"{where}: dataset name {twice[0]!r} appears twice; give each its own")
    for d in config.dataset:
        if d.kind != "embedded" and not d.path:
            raise ConfigError(f"{where}: dataset {d.name!r} has no path; name its JSONL file")
        if d.kind == "embedded" and config.target.kind != "embedded":
            raise ConfigError(
                f"{where}: dataset {d.name!r} is embedded but target.kind is not; "
                'use kind = "messages"'
            )
    router = config.generate.openrouter
    if router.reasoning_effort and router.reasoning_max_tokens:
        raise ConfigError(
            f"{where}: openrouter.reasoning_effort and openrouter.reasoning_max_tokens exclude "
            "each other; keep one"
        )
    host = router.base_url.partition("//")[2].partition("/")[0]
    if config.target.kind == "embedded" and host.endswith("openrouter.ai"):
        raise ConfigError(
            f"{where}: openrouter.base_url is the real one, and nobody there speaks the tokens of "
            'the built-in model; write [target] kind = "hf" with its path and tokenizer'
        )
    if config.target.kind == "hf" and not (config.target.path and config.target.tokenizer):
        raise ConfigError(f'{where}: target.kind = "hf" needs target.path and target.tokenizer')
