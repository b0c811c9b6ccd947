"""Rendering on the embedded vocabulary: variants, refusals, the text arm, hostile text."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.embedded import TARGET_DIR
from core.errors import RenderError, UsageError
from core.render.base import Renderer, load_renderer, tools_as_text
from core.render.kimi import VARIANTS, KimiRenderer
from core.render.tokenizer import NAMED_OFFSETS
from tests.kimi_files import KIMI, needs_kimi

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
CALL = {
    "id": "functions.get_weather:0",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city":"Oslo"}'},
}
LOOP: list[dict[str, Any]] = [
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "", "reasoning_content": " r", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "functions.get_weather:0", "content": "4C"},
]
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b", "reasoning_content": "r"},
    {"role": "user", "content": "c"},
]


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return load_renderer(TARGET_DIR, "kimi-k2.5")


def text(variant: str, messages: list[dict[str, Any]], thinking: bool = True) -> str:
    return load_renderer(TARGET_DIR, variant).render(messages, None, thinking).text


def test_variants_differ_as_their_templates_do() -> None:
    user = "<|im_user|>user<|im_middle|>c<|im_end|>"
    answer = "<|im_assistant|>assistant<|im_middle|>"
    hi = [{"role": "user", "content": "c"}]
    assert text("kimi-k2.5", hi) == f"{user}{answer}<think>"
    assert text("kimi-k2.5", hi, thinking=False) == f"{user}{answer}<think></think>"
    system = "<|im_system|>system<|im_middle|>{}<|im_end|>"
    kimi = system.format("You are Kimi, an AI assistant created by Moonshot AI.")
    assert text("kimi-k2-thinking", hi) == f"{kimi}{user}{answer}"
    assert text("kimi-k2", hi) == f"{system.format('You are a helpful assistant')}{user}{answer}"


@pytest.mark.parametrize("variant", ["kimi-k2.5", "kimi-k2.6"])
def test_the_reasoning_of_answered_turns_is_left_out(variant: str) -> None:
    assert "<|im_middle|><think></think>b<|im_end|>" in text(variant, HISTORY)


def test_preserved_thinking_of_every_turn() -> None:
    """K2.6 with the switch on: no turn is history (spec: kimi 1.4, the template's `fixed` form)."""
    whole = "<|im_assistant|>assistant<|im_middle|><think>{}</think>"
    messages = [*HISTORY, *LOOP]
    off, on = (
        load_renderer(TARGET_DIR, "kimi-k2.6").render(messages, None, True, keep).text
        for keep in (False, True)
    )
    assert on == off.replace(whole.format("") + "b", whole.format("r") + "b")
    assert on != off and whole.format(" r") in off
    instant = load_renderer(TARGET_DIR, "kimi-k2.6").render(messages, None, False, True).text
    assert whole.format("r") not in instant and instant.endswith(whole.format(""))


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v != "kimi-k2.6"])
def test_a_template_without_the_switch_refuses_it(variant: str) -> None:
    with pytest.raises(RenderError, match=f"the template of {variant} does not know it") as e:
        load_renderer(TARGET_DIR, variant).render(HISTORY, None, True, True)
    assert e.value.kind == "preserve_thinking_unknown"


def test_k2_declares_tools_as_json() -> None:
    prompt = load_renderer(TARGET_DIR, "kimi-k2").render(HISTORY, [TOOL], True)
    assert prompt.tools_mode == "json"
    assert '<|im_system|>tool_declare<|im_middle|>[{"type": "function"' in prompt.text


def test_unknown_variant() -> None:
    with pytest.raises(UsageError, match=r"kimi-k2\.5"):
        load_renderer(TARGET_DIR, "kimi-k9")


def test_fallback_names_the_schema(renderer: Renderer) -> None:
    bad = {
        "type": "function",
        "function": {
            "name": "bad",
            "parameters": {"type": "object", "properties": {"x": {"oneOf": []}}},
        },
    }
    prompt = renderer.render(HISTORY, [TOOL, bad], True)
    assert prompt.tools_mode == "json"
    assert prompt.fallback == "tools[1] bad.x: no type, anyOf, enum or $ref"


def test_text_arm_carries_the_block(renderer: Renderer) -> None:
    messages = [{"role": "system", "content": "Be brief."}, *HISTORY]
    asked = tools_as_text(messages, [TOOL])
    assert asked[0]["content"].startswith("# Tools\n\n## functions\nnamespace functions {\n")
    assert asked[0]["content"].endswith("}\n\nBe brief.")
    assert asked[1:] == HISTORY
    assert messages[0]["content"] == "Be brief."
    assert tools_as_text(HISTORY, [TOOL])[0]["role"] == "system"
    assert tools_as_text(HISTORY, None) is HISTORY
    assert tools_as_text(asked, [TOOL]) is asked
    assert renderer.render(asked, None, True).tools_mode is None


def test_opaque_ids_count_on_over_the_conversation(renderer: Renderer) -> None:
    foreign = [
        {**LOOP[1], "tool_calls": [{**CALL, "id": "call_1"}, {**CALL, "id": "call_2"}]},
        {"role": "tool", "tool_call_id": "call_2", "content": "B"},
        {"role": "tool", "tool_call_id": "call_1", "content": "A"},
        {**LOOP[1], "tool_calls": [{**CALL, "id": "toolu_xyz"}]},
        {"role": "tool", "tool_call_id": "toolu_xyz", "content": "C"},
    ]
    prompt = renderer.render([LOOP[0], *foreign], None, True).text
    assert "## Return of functions.get_weather:1\nB" in prompt
    assert "## Return of functions.get_weather:0\nA" in prompt
    assert "## Return of functions.get_weather:2\nC" in prompt
    assert "call_" not in prompt.replace("tool_call_", "")


def changed(index: int, **fields: Any) -> list[dict[str, Any]]:
    messages = [dict(m) for m in LOOP]
    messages[index] |= fields
    return messages


@pytest.mark.parametrize(
    ("messages", "kind"),
    [
        ([], "no_user_turn"),
        ([{"role": "system", "content": "s"}], "no_user_turn"),
        ([*HISTORY, {"role": "assistant", "content": "x"}], "last_message_assistant"),
        ([{"role": "critic", "content": "x"}], "role_unknown"),
        ([{"role": "user"}], "content_missing"),
        ([{"role": "user", "content": 5}], "content_invalid"),
        ([{"role": "user", "content": "x", "name": 5}], "content_invalid"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "media_unsupported"),
        (["text"], "messages_invalid"),
        ([{"role": "user", "content": "\ud800"}], "lone_surrogate"),
        (changed(2, tool_call_id="functions.get_weather:1"), "history_tool_result_orphan"),
        (changed(1, tool_calls=[{**CALL, "id": "functions.f:0"}]), "history_tool_id_nonnative"),
        (
            changed(1, tool_calls=[{**CALL, "id": "call_1"}, {**CALL, "id": "call_1"}]),
            "history_tool_id_duplicate",
        ),
        (changed(1, tool_calls=[{"id": "x"}]), "messages_invalid"),
        (changed(1, tool_calls={}), None),
        (changed(1, tool_calls="x"), "messages_invalid"),
    ],
)
def test_refusals(renderer: Renderer, messages: list[Any], kind: str | None) -> None:
    if kind is None:
        messages = [*messages[:2], {"role": "user", "content": "x"}]
        assert "section" not in renderer.render(messages, None, True).text
        return
    with pytest.raises(RenderError) as refusal:
        renderer.render(messages, None, True)
    assert refusal.value.kind == kind
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("arguments", ["", "no json", "[1]", "[" * 10_000, None, 5])
def test_arguments_in_the_history_must_be_an_object(renderer: Renderer, arguments: Any) -> None:
    call = {**CALL, "function": {"name": "get_weather", "arguments": arguments}}
    with pytest.raises(RenderError) as refusal:
        renderer.render(changed(1, tool_calls=[call]), None, True)
    assert refusal.value.kind == "history_tool_args_invalid"


def test_deep_tools_do_not_crash(renderer: Renderer) -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(10_000):
        schema = {"type": "object", "properties": {"x": schema}}
    tool = {"type": "function", "function": {"name": "deep", "parameters": schema}}
    with pytest.raises(RenderError) as refusal:
        renderer.render(HISTORY, [tool], True)
    assert refusal.value.kind == "tools_invalid"


@cache
def cached_renderer(directory: Path) -> Renderer:
    return load_renderer(directory, "kimi-k2.5")


SPELLINGS = st.sampled_from(
    [*NAMED_OFFSETS, "<|im_", "end|>", "<|reserved_token_1040|>", " ", "\n"]
)
HOSTILE = st.lists(
    st.one_of(SPELLINGS, st.text(st.characters(exclude_categories=["Cs"]), max_size=8)), max_size=6
).map("".join)


@pytest.mark.parametrize(
    "directory", [TARGET_DIR, pytest.param(KIMI, marks=needs_kimi)], ids=["embedded", "kimi"]
)
@settings(max_examples=150, deadline=None)
@given(user=HOSTILE, name=HOSTILE, result=HOSTILE, thoughts=HOSTILE, thinking=st.booleans())
def test_nothing_in_text_becomes_structure(
    directory: Path, user: str, name: str, result: str, thoughts: str, thinking: bool
) -> None:
    renderer = cached_renderer(directory)
    tokenizer = renderer.tokenizer
    plain = renderer.render(LOOP, None, thinking)
    messages = [
        {"role": "user", "content": user, "name": name},
        {**LOOP[1], "reasoning_content": thoughts, "content": result},
        {**LOOP[2], "content": [{"type": "text", "text": result}, {"type": "text", "text": user}]},
    ]
    prompt = renderer.render(messages, None, thinking)
    structure = [i for i in prompt.ids if tokenizer.is_special(i)]
    assert structure == [i for i in plain.ids if tokenizer.is_special(i)]
    assert tokenizer.decode(prompt.ids) == prompt.text
    for spelled in prompt.control_strings:
        assert any(spelled in t for t in (user, name, result, thoughts, result + user))


def test_long_runs_are_cut_over_the_whole_text() -> None:
    """A server chunks the rendered text, markers included: the run starts before the user text."""
    renderer = KimiRenderer.load(TARGET_DIR, VARIANTS["kimi-k2.5"])
    run = "-" * 60_001
    prompt = renderer.render([{"role": "user", "content": run}], None, True)
    head = len("<|im_user|>user<|im_middle|>")
    pieces = [run[: 25_000 - head], run[25_000 - head : 50_000 - head], run[50_000 - head :]]
    encode = renderer.tokenizer.encode_ordinary
    ids = [i for piece in pieces for i in encode(piece)]
    end = renderer.tokenizer.specials["<|im_end|>"]
    assert prompt.ids[3 : 3 + len(ids) + 1] == [*ids, end]
