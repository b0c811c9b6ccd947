"""Which tokenizer and template a config means, and the switches that they must know."""

from pathlib import Path
from typing import Any

import pytest

from core.config import TARGET_DIR, Config, parse
from core.errors import ConfigError, TokenizerError
from core.render.source import pinned, renderer_of, tokenizer_dir


def config_of(target: dict[str, Any], **dataset: Any) -> Config:
    section = {"name": "d", "path": "x.jsonl", **dataset}
    return parse({"target": target, "dataset": [section]}, "t")


def test_a_directory_wins_over_a_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert tokenizer_dir("") == TARGET_DIR
    assert tokenizer_dir("/no/such/folder") == Path("/no/such/folder")
    with pytest.raises(TokenizerError, match="acme/small-1: no such directory, and its files"):
        tokenizer_dir("acme/small-1")
    (tmp_path / "acme" / "small-1").mkdir(parents=True)
    assert tokenizer_dir("acme/small-1") == Path("acme/small-1")
    config = config_of({"tokenizer": "acme/small-1"})
    assert pinned(config) is config


@pytest.mark.parametrize("variant", ["kimi-k2", "kimi-k2-thinking", "kimi-k2.5"])
def test_a_variant_that_does_not_know_the_switch_refuses_it(variant: str) -> None:
    config = config_of({"variant": variant}, backend="sglang", preserve_thinking=True)
    words = f"dataset 'd': preserve_thinking: the template of {variant} does not know it"
    with pytest.raises(ConfigError, match=words) as e:
        renderer_of(config)
    assert "\n" not in str(e.value)


def test_openrouter_cannot_pass_the_switch_on() -> None:
    target = {"variant": "kimi-k2.6"}
    with pytest.raises(ConfigError, match="openrouter cannot pass it on"):
        renderer_of(config_of(target, preserve_thinking=True))
    for backend in ("sglang", "vllm", "openai"):
        config = config_of(target, backend=backend, preserve_thinking=True)
        assert renderer_of(config).preserves_thinking
