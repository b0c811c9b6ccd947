"""Where a run's tokenizer comes from: a directory, the hub's cache, or the embedded target.

Knows the config's [target]; every process of a run asks here, so that all mean the same files.
"""

from pathlib import Path

import msgspec

from core.config import TARGET_DIR, Config
from core.errors import ConfigError, TokenizerError
from core.render import hub
from core.render.base import Renderer, load_renderer


def _is_folder(path: str) -> bool:
    """Raises TokenizerError for what no file system takes as a name."""
    try:
        return "\0" not in path and Path(path).is_dir()
    except OSError as e:
        raise TokenizerError(
            f"{path[:80]}: no directory can be called so ({e.strerror}); name a tokenizer directory"
        ) from e


def tokenizer_dir(tokenizer: str, variant: str = "", download: bool = False) -> Path:
    """`tokenizer` as in `target.tokenizer`: a directory, `owner/name[@revision]`, or empty.

    A hub name is looked up in the local cache; `download` allows the network. Raises
    TokenizerError. A directory that does not exist is left to whoever reads it, unless its name
    may be a hub's.
    """
    if not tokenizer:
        return TARGET_DIR
    name = hub.hub_name(tokenizer)
    if _is_folder(tokenizer) or name is None:
        return Path(tokenizer)
    files = hub.TEMPLATE_FILES if variant == "template" else hub.KIMI_FILES
    if found := hub.cached(name, files):
        return found
    if download:
        return hub.download(name, files)
    raise TokenizerError(
        f"{tokenizer}: no such directory, and its files are not in the hub's cache; to fetch them,"
        " a few MB of data, add --download to eyas tokens or eyas doctor, or set target.download ="
        " true"
    )


def pinned(config: Config) -> Config:
    """The config with a hub's tokenizer at the commit that is there now. Raises TokenizerError."""
    target = config.target
    name = hub.hub_name(target.tokenizer)
    if name is None or _is_folder(target.tokenizer):
        return config
    folder = tokenizer_dir(target.tokenizer, target.variant, target.download)
    at_commit = str(name._replace(revision=folder.name))
    return msgspec.structs.replace(
        config, target=msgspec.structs.replace(target, tokenizer=at_commit)
    )


def renderer_of(config: Config) -> Renderer:
    """Raises TokenizerError, and ConfigError for a switch that the template does not know."""
    target = config.target
    folder = tokenizer_dir(target.tokenizer, target.variant, target.download)
    renderer = load_renderer(folder, target.variant)
    for dataset in config.dataset:
        if not dataset.preserve_thinking:
            continue
        what = f"dataset {dataset.name!r}: preserve_thinking"
        if not renderer.preserves_thinking:
            raise ConfigError(
                f"{what}: the template of {target.variant} does not know it; take the key out, or"
                " set target.variant"
            )
        if dataset.backend == "openrouter":
            raise ConfigError(
                f"{what}: openrouter cannot pass it on; use backend sglang, vllm or openai"
            )
    return renderer
