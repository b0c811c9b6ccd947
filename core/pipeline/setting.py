"""What every process of a run agrees on: absolute paths in the resolved config, the prompts.

Knows config and prompts, nothing about processes.
"""

from io import BytesIO
from pathlib import Path

import msgspec

from core.config import Config
from core.embedded import TARGET_DIR
from core.errors import PromptError, StoreError
from core.prompts import load_prompts
from core.render.hub import hub_name
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

    tokenizer = config.target.tokenizer
    if hub_name(tokenizer) is None or (base / tokenizer).is_dir():
        tokenizer = absolute(tokenizer)
    target = replace(config.target, path=absolute(config.target.path), tokenizer=tokenizer)
    datasets = [replace(d, path=absolute(d.path)) for d in config.dataset]
    return replace(
        config,
        run=replace(config.run, dir=absolute(config.run.dir)),
        target=target,
        dataset=datasets,
    )


def write_prompts(run: RunDir, config: Config) -> list[Prompt]:
    """Read the datasets and freeze them as prompts.jsonl. Raises PromptError, with nothing
    written."""
    prompts = load_prompts(config)
    if not prompts:
        raise PromptError("no prompts: every dataset is empty; check [[dataset]] path and limit")
    write_atomic(run.prompts, b"".join(encode_line(p) for p in prompts))
    return prompts


def read_prompts(run: RunDir) -> list[Prompt]:
    """What `write_prompts` froze; none without the file. Raises StoreError where a line cannot be
    read: its prompt would be left out in silence."""
    prompts = list(read_jsonl(run.prompts, Prompt))
    with run.prompts.open("rb") if run.prompts.exists() else BytesIO() as file:
        lost = sum(not line.isspace() for line in file) - len(prompts)
    if lost:
        raise StoreError(
            f"{run.prompts}: {lost} prompts cannot be read; delete it, and `eyas resume` reads the "
            "datasets again"
        )
    return prompts
