"""The config: every TOML that ships loads, what is wrong is named with the nearest right thing,
overrides, round trip."""

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from core.config import Config, config_hash, dump, load, parse
from core.config_sections import Section
from core.errors import ConfigError
from core.pipeline.setting import DEMO_CONFIG, resolve

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted(
    p
    for p in [*ROOT.glob("*.toml"), *ROOT.glob("tests/**/*.toml"), *ROOT.glob("core/**/*.toml")]
    if p.name != "pyproject.toml"
)


def test_there_are_the_files_that_the_design_names() -> None:
    names = {p.relative_to(ROOT).as_posix() for p in SHIPPED}
    assert {"config.toml", "tests/data/kimi.toml"} <= names


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.name)
def test_every_shipped_toml_loads_and_survives_a_round_trip(path: Path, tmp_path: Path) -> None:
    config = load(path)
    copy = tmp_path / "copy.toml"
    copy.write_text(dump(config))
    assert load(copy) == config
    assert config_hash(load(copy)) == config_hash(config)
    assert config.dataset


def test_the_packaged_demo_is_the_root_config() -> None:
    assert DEMO_CONFIG.read_bytes() == (ROOT / "config.toml").read_bytes()


def test_the_reference_run_is_the_one_of_the_design() -> None:
    config = load(ROOT / "tests/data/kimi.toml")
    router = config.generate.openrouter
    assert config.generate.max_in_flight == 2_000 and config.run.budget_usd == 100.0
    assert (router.quantizations, router.sort, router.require_parameters) == (
        ["int4"],
        "price",
        True,
    )
    assert router.only and router.ignore and router.model == "moonshotai/kimi-k2.5"
    assert sum(d.limit for d in config.dataset) == 83_000 and len(config.dataset) == 8
    assert {d.backend for d in config.dataset} == {"openrouter", "sglang"}
    assert config.extract.aux_layers == [1, 29, 57]


def test_the_embedded_target_is_never_asked_of_openrouter_by_default() -> None:
    assert parse({}, "t").generate.openrouter.base_url == ""
    real = {"target": {"kind": "hf", "path": "p", "tokenizer": "t"}}
    assert parse(real, "t").generate.openrouter.base_url == "https://openrouter.ai/api/v1"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"run": {"budgt_usd": 1.0}}, "unknown key run.budgt_usd; did you mean run.budget_usd?"),
        ({"generate": {"openrouter": {"ony": []}}}, "did you mean generate.openrouter.only?"),
        ({"dataset": [{"nam": "x"}]}, "unknown key dataset.nam; did you mean dataset.name?"),
        ({"run": {"seed": "seven"}}, "run.seed: expected `int`, got `str`"),
        ({"run": {"budget_usd": -1.0}}, ">= 0"),
        ({"run": {"budget_usd": 1e308}}, "<= 1000000000.0"),
        ({"run": {"budget_usd": math.inf}}, "run.budget_usd = inf: not a finite number"),
        ({"generate": {"temperature": math.nan}}, "generate.temperature = nan: not a finite"),
        ({"dataset": [{"name": "a", "path": "x", "limit": math.inf}]}, "dataset.0.limit = inf"),
        ({"run": {"seed": -1}}, "run.seed: expected `int` >= 0"),
        ({"run": {"seed": 2**60}}, "<= 9007199254740992"),
        (
            {"train": {"mask_align": "other"}},
            "train.mask_align: 'other' is not known; use serving, target, legacy",
        ),
        ({"run": {"stages": ["trian"]}}, "run.stages[0]: 'trian' is not known; use generate, "),
        ({"dataset": [{"name": "a", "kind": "message"}]}, "dataset[0].kind: 'message' is not"),
        ({"generate": {"openrouter": {"sort": "x"}}}, "is not known; use price, throughput"),
        ({"dataset": [{"name": "a", "path": "x"}, {"name": "a", "path": "y"}]}, "appears twice"),
        ({"dataset": [{"name": "a"}]}, "has no path"),
        ({"target": {"kind": "hf"}}, "needs target.path"),
        (
            {"generate": {"openrouter": {"base_url": "https://openrouter.ai/api/v1"}}},
            "nobody there speaks the tokens of the built-in model; write [target]",
        ),
        ({"target": {"device": "cdua"}}, "target.device: not a device; use cpu, mps, cuda"),
        ({"train": {"device": "cuda:x"}}, "train.device: not a device"),
    ],
)
def test_mistakes_are_named_in_one_line(data: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(data, "my.toml")
    message = str(caught.value)
    assert message.startswith("my.toml: ") and words in message and "\n" not in message
    assert caught.value.exit_code == 2


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "none.toml")
    bad = tmp_path / "bad.toml"
    bad.write_bytes(b"[run\n")
    with pytest.raises(ConfigError, match=r"not TOML.*; mend the file"):
        load(bad)
    bad.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not TOML"):
        load(bad)


def test_overrides(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("[run]\nseed = 1\n")
    config = load(
        path,
        ["run.seed=9", "run.name=alpha", 'generate.openrouter.only=["a","b"]', "train.lr=1e-3"],
    )
    assert (config.run.seed, config.run.name, config.train.lr) == (9, "alpha", 1e-3)
    assert config.generate.openrouter.only == ["a", "b"]
    for wrong in ("run.seed", "=1", "run..seed=1"):
        with pytest.raises(ConfigError, match=r"write section\.key=value"):
            load(path, [wrong])
    with pytest.raises(ConfigError, match="is not a section"):
        load(path, ["run.seed.x=1"])
    with pytest.raises(ConfigError, match=r"did you mean run\.seed"):
        load(path, ["run.sed=1"])


def test_paths_are_relative_to_the_toml(tmp_path: Path) -> None:
    raw = {
        "target": {"kind": "hf", "path": "models/k", "tokenizer": "/abs/t"},
        "dataset": [{"name": "a", "path": "data/a.jsonl"}],
    }
    config = resolve(parse(raw, "x"), tmp_path)
    assert config.target.path == str(tmp_path / "models/k") and config.target.tokenizer == "/abs/t"
    assert config.dataset[0].path == str(tmp_path / "data/a.jsonl")
    assert config.run.dir == str(tmp_path / "runs")
    assert resolve(config, Path("/elsewhere")) == config
    assert resolve(Config(), tmp_path).target.path == ""


def test_every_field_is_a_known_type() -> None:
    """A section that forgot `frozen` could be changed behind the hash."""
    for section in msgspec.structs.fields(Config):
        kind = section.type
        if isinstance(kind, type) and issubclass(kind, Section):
            with pytest.raises(AttributeError):
                setattr(kind(), msgspec.structs.fields(kind)[0].name, None)


def test_a_byte_order_mark_and_windows_line_ends_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_bytes(b"\xef\xbb\xbf[run]\r\nseed = 3\r\n")
    assert load(path).run.seed == 3


def test_an_override_that_no_file_takes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load(path, ["run.seed=\udcff"])


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"openrouter": {"base_url": "http://me:secret@host/api"}}, "openrouter.base_url holds a"),
        ({"openai": {"base_url": "https://me@host"}}, "openai.base_url holds a user name"),
        ({"sglang": {"urls": ["http://a", "http://x:y@b/"]}}, "sglang.urls holds a user name"),
        ({"openrouter": {"app_url": "a\r\nX: y"}}, "app_url holds a control character"),
    ],
)
def test_an_address_that_would_leak_or_break_a_request_is_refused(
    section: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        parse({"generate": section}, "c.toml")
    assert "secret" not in str(caught.value)
    assert parse({"generate": {"openai": {"base_url": "https://host/p@q"}}}, "c.toml")
