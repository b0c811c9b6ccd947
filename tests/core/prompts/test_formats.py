"""Each dataset format with the oddities that its published set has. Rows are invented."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.prompts import (
    glaive,
    magicoder,
    messages,
    mot,
    nemotron,
    opencode,
    swesmith,
    toolace,
    xlam,
)
from core.prompts.conversation import Conversation, normalise, parameters, safe_name

WEATHER = {"name": "get_weather", "description": "Weather.", "parameters": {"type": "object"}}
SECOND = {**WEATHER, "name": "b"}
QUERY = {"type": "dict", "properties": {"q": {"type": "float"}}}


def sent(conversation: Conversation) -> list[tuple[str, str]]:
    return [(m["role"], m["content"]) for m in normalise(conversation).messages]


def calls(conversation: Conversation) -> list[tuple[str, str]]:
    return [
        (c["id"], c["function"]["arguments"])
        for m in normalise(conversation).messages
        for c in m.get("tool_calls", [])
    ]


def test_glaive_with_all_its_oddities() -> None:
    row = {
        "system": "SYSTEM: You are a helpful assistant with access to the following functions. "
        "Use them if required -\n"
        + json.dumps(WEATHER)
        + "\n"
        + json.dumps({**WEATHER, "name": "b"}),
        "chat": "USER: Hi, USER: is a role word.\n\n\n"
        "ASSISTANT: Let me look.\n\n\n"
        'ASSISTANT: <functioncall> {"name": "get_weather", "arguments": '
        '\'{"city": "O\'Fallon",\n "days": 2}\'} <|endoftext|>\n\n\n'
        'FUNCTION RESPONSE: {"rain": true}\n\n\n'
        "ASSISTANT: Rain. <|endoftext|>\n\n\n"
        "USER: \n\n\n"
        "USER: And tomorrow?\n\n\n"
        "ASSISTANT: Sun. <|endoftext|>",
    }
    conversation = glaive.convert(row)
    assert sent(conversation) == [
        ("user", "Hi, USER: is a role word."),
        ("assistant", "Let me look."),
        ("tool", '{"rain": true}'),
        ("assistant", "Rain."),
        ("user", "And tomorrow?"),
    ]
    assert calls(conversation) == [("functions.get_weather:0", '{"city": "O\'Fallon", "days": 2}')]
    tools = normalise(conversation).tools
    assert tools and [t["function"]["name"] for t in tools] == ["get_weather", "b"]
    assert tools[0]["type"] == "function"


def test_glaive_without_functions_and_with_unreadable_calls() -> None:
    row = {
        "system": "SYSTEM: You are a helpful assistant, with no access to external functions.",
        "chat": "USER: Hi\n\n\nASSISTANT: Hello <|endoftext|>",
    }
    assert sent(glaive.convert(row)) == [
        ("system", "You are a helpful assistant, with no access to external functions."),
        ("user", "Hi"),
    ]
    for call in ('{"name": "x", "arguments": \'{"a": \'}', "{name}"):
        with pytest.raises(ValueError):
            glaive.convert({**row, "chat": f"USER: Hi\n\n\nASSISTANT: <functioncall> {call}"})


def test_single_field_formats() -> None:
    assert sent(opencode.convert({"input": "Sort it.", "output": "x"})) == [("user", "Sort it.")]
    assert sent(magicoder.convert({"problem": "P", "solution": "s"})) == [("user", "P")]
    assert sent(magicoder.convert({"instruction": "I", "response": "r"})) == [("user", "I")]
    for convert, row in ((opencode.convert, {"input": " "}), (magicoder.convert, {"seed": "x"})):
        with pytest.raises(ValueError, match="remove the row"):
            convert(row)


def test_thinking_is_not_part_of_a_prompt() -> None:
    row = {
        "messages": [
            {"role": "user", "content": "1+1?"},
            {"role": "assistant", "content": "<think>\nsecret\n</think>\nTwo."},
            {"role": "user", "content": "Sure?"},
            {"role": "assistant", "content": "<think>yes</think>Yes."},
        ]
    }
    assert sent(mot.convert(row)) == [("user", "1+1?"), ("assistant", "Two."), ("user", "Sure?")]


def test_nemotron_objects_as_arguments_and_reasoning() -> None:
    row = {
        "messages": [
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "Look it up.",
                "tool_calls": [
                    {"id": "x1", "function": {"name": "get_weather", "arguments": {"city": "Ås"}}}
                ],
            },
            {"role": "tool", "tool_call_id": "x1", "content": "rain"},
            {"role": "assistant", "content": "Rain."},
        ],
        "tools": [{"type": "function", "function": WEATHER}],
    }
    conversation = nemotron.convert(row)
    normal = normalise(conversation)
    assert [m["role"] for m in normal.messages] == ["user", "assistant", "tool"]
    assert calls(conversation) == [("functions.get_weather:0", '{"city": "Ås"}')]
    assert normal.messages[1]["reasoning_content"] == "Look it up."
    assert normal.messages[2]["tool_call_id"] == "functions.get_weather:0"


def test_swesmith_messages_in_a_string_and_content_in_parts() -> None:
    row = {
        "messages": json.dumps(
            [
                {"role": "system", "content": "You fix bugs."},
                {"role": "user", "content": [{"type": "text", "text": "Fix "}, {"text": "it."}]},
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [
                        {"id": "call_1", "function": {"name": "bash", "arguments": "{}"}}
                    ],
                },
                {"role": "tool", "tool_call_id": "call_1", "content": "ok"},
                {"role": "assistant", "content": "Done."},
            ]
        )
    }
    assert sent(swesmith.convert(row))[1] == ("user", "Fix it.")
    assert calls(swesmith.convert(row)) == [("functions.bash:0", "{}")]


def test_xlam_types_become_json_schema() -> None:
    tools = [
        {
            "name": "f",
            "description": "d",
            "parameters": {
                "a": {"type": "str", "description": "x"},
                "b": {"type": "int, optional", "default": 3},
                "c": {"type": "List[str], optional"},
                "d": {"type": "dict"},
            },
        }
    ]
    normal = normalise(xlam.convert({"query": "q", "tools": json.dumps(tools), "answers": "[]"}))
    assert normal.tools is not None
    schema = normal.tools[0]["function"]["parameters"]
    assert schema["type"] == "object" and schema["required"] == ["a", "d"]
    types = {name: sub["type"] for name, sub in schema["properties"].items()}
    assert types == {"a": "string", "b": "integer", "c": "array", "d": "object"}


def test_toolace_python_calls_and_names_with_spaces() -> None:
    functions = [
        {
            "name": "Get Weather",
            "parameters": {"type": "dict", "properties": {"q": {"type": "float"}}},
        },
        {"name": "Time", "parameters": {"type": "dict", "properties": {}}},
    ]
    row = {
        "system": "You are an expert. Here is a list of functions:\n"
        + json.dumps(functions)
        + "\nAnswer with [func(a=1)].",
        "conversations": [
            {"from": "user", "value": "Weather (now)?"},
            {
                "from": "assistant",
                "value": '[Get Weather(q="a, (b]", days=[1, 2], ok=true), Time()]',
            },
            {"from": "tool", "value": '[{"name": "Get Weather"}, {"name": "Time"}]'},
            {"from": "assistant", "value": "Rain."},
        ],
    }
    conversation = toolace.convert(row)
    normal = normalise(conversation)
    assert calls(conversation) == [
        ("functions.Get_Weather:0", '{"q": "a, (b]", "days": [1, 2], "ok": true}'),
        ("functions.Time:1", "{}"),
    ]
    assert normal.renamed == {"Get Weather": "Get_Weather"}
    assert [m["role"] for m in normal.messages] == ["user", "assistant", "tool", "tool"]
    assert normal.messages[3]["tool_call_id"] == "functions.Time:1"
    assert normal.tools is not None
    assert normal.tools[0]["function"]["parameters"]["properties"]["q"]["type"] == "number"


@pytest.mark.parametrize("text", ["[f(1)]", "[f(a=g())]", "[f(a=]", "[(a=1)]"])
def test_toolace_calls_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ValueError):
        toolace.parse_calls(text)


def test_toolace_text_in_brackets_is_text() -> None:
    assert toolace.parse_calls("[see note]") == []
    assert toolace.parse_calls("plain (text)") == []


@given(st.text(max_size=60))
def test_parsers_of_foreign_text_end_in_a_value_or_a_valueerror(text: str) -> None:
    for work in (
        lambda: toolace.parse_calls(f"[{text}]"),
        lambda: glaive.convert({"system": text, "chat": f"USER: {text}"}),
        lambda: glaive.convert(
            {"system": "", "chat": f"USER: a\n\n\nASSISTANT: <functioncall>{text}"}
        ),
        lambda: toolace.convert(
            {"system": "[{" + text, "conversations": [{"from": "user", "value": text}]}
        ),
    ):
        try:
            value = work()
        except ValueError:
            continue
        assert isinstance(value, list | Conversation)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(
            ["role", "content", "messages", "tools", "name", "function", "parameters", "type",
             "properties", "required", "tool_calls", "arguments", "id", "text", "oneOf", "items"]
        ),
        inner,
        max_size=4,
    ),
    max_leaves=20,
)  # fmt: skip


@given(st.dictionaries(st.sampled_from(["messages", "tools", "thinking"]), JSON))
def test_any_json_is_a_conversation_or_a_valueerror(row: dict[str, Any]) -> None:
    try:
        normal = normalise(messages.convert(row))
    except ValueError:
        return
    assert any(m["role"] == "user" for m in normal.messages)
    assert normal.messages[-1]["role"] != "assistant"


def test_schemas_take_the_typescript_path() -> None:
    fixed = parameters(
        {
            "type": "dict",
            "properties": {
                "a": {"oneOf": [{"type": "int"}, {"const": "x"}]},
                "b": {"type": ["str", "null"]},
                "c": {"type": "list", "items": {"type": "tuple"}},
                "d": {"type": "string", "optional": True},
            },
            "required": ["a", "missing"],
        }
    )
    assert fixed["properties"]["a"] == {"anyOf": [{"type": "integer"}, {"enum": ["x"]}]}
    assert fixed["properties"]["b"]["type"] == ["string", "null"]
    assert fixed["properties"]["c"] == {"type": "array", "items": {"type": "array"}}
    assert fixed["required"] == ["a"]
    assert parameters(None) == {"type": "object", "properties": {}}


@pytest.mark.parametrize(
    ("name", "safe"), [("a.b-c_d1", "a.b-c_d1"), (" Get It ", "Get_It"), ("é:1", "__1"), ("", "_")]
)
def test_names_fit_call_ids(name: str, safe: str) -> None:
    assert safe_name(name) == safe


@pytest.mark.parametrize(
    "rows",
    [
        [{"role": "assistant", "content": "x"}],
        [{"role": "user", "content": [{"type": "image_url"}]}],
        [{"role": "robot", "content": "x"}, {"role": "user", "content": "x"}],
        [{"role": "user", "content": "x"}, {"role": "tool", "content": "y"}],
        [{"content": "x"}],
        "text",
    ],
)
def test_what_cannot_be_asked_is_refused(rows: Any) -> None:
    with pytest.raises(ValueError):
        normalise(Conversation(rows))
