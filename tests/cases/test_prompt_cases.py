"""Cases whose input is a prompt or a tokenizer directory: C05 (tail), C24, C50, C53, C56."""

import json
import shutil
from pathlib import Path

import pytest

from core.errors import RenderError, TokenizerError
from core.render.history import native_history
from core.render.tokenizer import Tokenizer
from tests.kimi_files import KIMI, ask_tokens, case, kimi_renderer, needs_cases

pytestmark = needs_cases


def test_c05_instant_prompt_ends_closed() -> None:
    data = case("C05.json")
    prompt = kimi_renderer().render(data["request"]["messages"], None, thinking=False)
    assert prompt.ids[-5:] == data["expect"][2]["prompt_ids_tail"]


def test_c24_foreign_ids_are_made_native() -> None:
    data = case("C24.json")
    messages, expect = data["request"]["messages"], data["expect"]
    assert native_history(messages) == expect["request_messages_rewritten"]
    prompt = kimi_renderer().render(messages, None, thinking=True)
    assert prompt.text == expect["prompt_text"]
    assert prompt.ids == expect["prompt_ids"]
    assert "call_abc123" not in prompt.text


@pytest.mark.parametrize("bad", ["functions.get_weather", "functionsget_weather0", "a b", "<|x|>"])
def test_c24_damaged_ids_are_refused(bad: str) -> None:
    data = case("C24.json")
    messages = json.loads(json.dumps(data["request"]["messages"]).replace("call_abc123", bad))
    with pytest.raises(RenderError) as refusal:
        kimi_renderer().render(messages, None, thinking=True)
    assert refusal.value.kind == data["expect"]["alternative"]["class"]


def test_c50_every_special_id() -> None:
    data = case("C50.json")
    tokenizer = Tokenizer.load(KIMI)
    assert tokenizer.vocab_size == data["expect"]["n_vocab"]
    assert tokenizer.num_base == data["expect"]["base_tokens"]
    for name, token_id in data["special_ids"].items():
        assert tokenizer.specials[name] == token_id
        assert tokenizer.encode_special(name) == [token_id]
        assert tokenizer.decode([token_id]) == name
    for text, ids in data["probe"].items():
        assert tokenizer.encode_special(text) == ids


@pytest.mark.parametrize(("name", "wrong"), [("</think>", 163603), ("<|im_end|>", 163589)])
def test_c50_shifted_ids_refuse_to_start(tmp_path: Path, name: str, wrong: int) -> None:
    shutil.copy(KIMI / "tiktoken.model", tmp_path)
    config = json.loads((KIMI / "tokenizer_config.json").read_text())
    added = config["added_tokens_decoder"]
    right = next(key for key, row in added.items() if row["content"] == name)
    added[str(wrong)] = added.pop(right)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(TokenizerError) as refusal:
        Tokenizer.load(tmp_path)
    assert refusal.value.kind == case("C50.json")["expect"]["class"]
    assert name in str(refusal.value) or "<|media_content|>" in str(refusal.value)
    assert right in str(refusal.value) or "163603" in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_c53_control_strings_stay_text_and_are_named() -> None:
    data = case("C53.json")
    (answer,) = ask_tokens(
        "render", [{"id": 1, "messages": data["request"]["messages"]}], kimi_renderer()
    )
    assert answer["ids"] == data["expect"]["sglang"]["input_ids"]
    assert answer["ids"] != data["expect"]["sglang"]["must_not_equal"]
    assert answer["control_strings"] == ["</think>", "<|im_end|>", "<|im_middle|>", "<|im_system|>"]


def test_c56_consecutive_tool_results() -> None:
    data = case("C56.json")
    request = {"id": 1, **data["request"]}
    (answer,) = ask_tokens("render", [request], kimi_renderer())
    assert answer["text"] == data["expect"]["prompt_text"]
    assert answer["ids"] == data["expect"]["prompt_ids"]
