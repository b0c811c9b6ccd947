"""What every process of a run agrees on: absolute paths in the resolved config, the tokenizer, the
prompts.

Knows config, prompts and renderer, nothing about processes.
"""

from pathlib import Path

import msgspec

from core.config import Config
from core.embedded import TARGET_DIR
from core.errors import PromptError
from core.prompts import load_prompts
from core.render.base import Renderer, load_renderer
from core.schema import Prompt
from core.store import RunDir, encode_line, read_jsonl, write_atomic

DEMO_CONFIG = TARGET_DIR.parent / "demo.toml"
"""The packaged copy of the repository's config.toml."""


def resolve(config: Config, base: Path) -> Config:
    """Relative paths were relative to the TOML's folder `base`: make them absolute, so that the
    copy in the run directory means the same."""
    replace = msgspec.structs.replace

    def absolute(path: str) -> str:
        return str((base / Path(path).expanduser()).resolve()) if path else ""

    target = replace(
        config.target,
        path=absolute(config.target.path),
        tokenizer=absolute(config.target.tokenizer),
    )
    datasets = [replace(d, path=absolute(d.path)) for d in config.dataset]
    return replace(
        config,
        run=replace(config.run, dir=absolute(config.run.dir)),
        target=target,
        dataset=datasets,
    )


def tokenizer_dir(config: Config) -> Path:
    return Path(config.target.tokenizer) if config.target.tokenizer else TARGET_DIR


def renderer_of(config: Config) -> Renderer:
    """Raises TokenizerError."""
    return load_renderer(tokenizer_dir(config), config.target.variant)


def write_prompts(run: RunDir, config: Config) -> list[Prompt]:
    """Read the datasets and freeze them as prompts.jsonl. Raises PromptError, with nothing
    written."""
    prompts = load_prompts(config)
    if not prompts:
        raise PromptError("no prompts: every dataset is empty; check [[dataset]] path and limit")
    write_atomic(run.prompts, b"".join(encode_line(p) for p in prompts))
    return prompts


def read_prompts(run: RunDir) -> list[Prompt]:
    return list(read_jsonl(run.prompts, Prompt))
