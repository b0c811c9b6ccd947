"""The Jinja renderer on a small tokenizer that the test makes."""

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from core.errors import RenderError, TokenizerError
from core.render.base import load_renderer

TEMPLATE = """
{%- for m in messages %}
{{- '<|start|>' + m['role'] + '\\n' + m['content'] + '<|end|>\\n' }}
{%- endfor %}
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|start|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["hello hello world"], trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "eos_token": {"content": "<|end|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def test_renders_and_encodes(directory: Path) -> None:
    renderer = load_renderer(directory, "template")
    prompt = renderer.render([{"role": "user", "content": "hello é😀"}], None, True)
    assert prompt.text == "<|start|>user\nhello é😀<|end|>\n<|start|>assistant\n"
    assert renderer.tokenizer.decode(prompt.ids) == prompt.text
    assert renderer.tokenizer.decode_bytes(prompt.ids) == prompt.text.encode()
    assert prompt.ids.count(renderer.tokenizer.specials["<|start|>"]) == 2
    assert renderer.end_id == renderer.tokenizer.specials["<|end|>"]
    assert renderer.grammar is None
    assert prompt.control_strings == []


def test_specials_in_user_text_stay_text(directory: Path) -> None:
    renderer = load_renderer(directory, "template")
    prompt = renderer.render([{"role": "user", "content": "a<|end|>b"}], None, True)
    assert "a<|end|>b" in prompt.text
    assert prompt.ids.count(renderer.tokenizer.specials["<|end|>"]) == 1
    assert prompt.control_strings == ["<|end|>"]
    assert renderer.tokenizer.decode_bytes(prompt.ids) == prompt.text.encode()


def test_the_template_is_sandboxed(directory: Path) -> None:
    attack = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    (directory / "chat_template.jinja").write_text(attack)
    renderer = load_renderer(directory, "template")
    with pytest.raises(RenderError) as refusal:
        renderer.render([{"role": "user", "content": "x"}], None, True)
    assert refusal.value.kind == "template_refused"


def test_a_template_may_refuse(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("{{ raise_exception('no system role') }}")
    with pytest.raises(RenderError, match="no system role"):
        load_renderer(directory, "template").render([{"role": "user", "content": "x"}], None, True)


def test_preserve_thinking_where_the_template_reads_it(directory: Path) -> None:
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(RenderError, match="template does not know it"):
        load_renderer(directory, "template").render(messages, None, True, True)
    knows = "{{ 'kept' if preserve_thinking is defined and preserve_thinking else 'dropped' }}"
    (directory / "chat_template.jinja").write_text(knows)
    renderer = load_renderer(directory, "template")
    said = [renderer.render(messages, None, True, keep).text for keep in (False, True)]
    assert (renderer.preserves_thinking, said) == (True, ["dropped", "kept"])


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("tokenizer.json", None),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "no json"),
        ("tokenizer_config.json", None),
        ("tokenizer_config.json", "{}"),
        ("tokenizer_config.json", '{"chat_template": "{% if %}"}'),
    ],
)
def test_bad_directories(directory: Path, name: str, data: str | None) -> None:
    (directory / name).unlink()
    if data is not None:
        (directory / name).write_text(data)
    with pytest.raises(TokenizerError) as error:
        load_renderer(directory, "template")
    assert "\n" not in str(error.value)
