"""What peers and eyas are both asked: Kimi's golden completions and prompts, and made-up ones.

A made-up completion is built by structure, so its ids are the truth; `odd` names what was done to
it (empty: a completion as the model should write it). Seeded: the same inputs every time."""

import codecs
import json
import random
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from core.render.base import Renderer
from tests.kimi_files import golden

SB, SE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
B, A, E = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
CLOSE, OPEN, END = "</think>", "<think>", "<|im_end|>"
NAMES = ["get_weather", "search", "run-code", "fs.read", "Bash"]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"About {name}.",
            "parameters": {
                "type": "object",
                "properties": {key: {"type": "string"}},
                "required": [key],
            },
        },
    }
    for name, key in zip(NAMES, ["city", "query", "code", "path", "command"], strict=True)
]
WORDS = [
    *("the", "a", "of", "Paris", "weather", "42", "3.14", "it's", "we'd", "ok,", "done.", "(see)"),
    *("x=1", "foo_bar", "naïve", "北京", "天气", "東京", "한국어", "😀", "👩\u200d💻", "…", "—"),
    *("\n", "\n\n", "\t", "", "", "```", "{}", "[]", "<b>", "</p>", "<|", "|>", "</thin", "\\n"),
    *('"q"', "'q'", "12345", "⭐️", "é", "ﬀ"),
]
_CALL_NUMBER = re.compile(r"<\|tool_call_begin\|>[^<]*:(\d+)<")
ODD = [
    *("index_high", "duplicate_id", "space_id", "bare_counter", "unicode_name", "no_prefix"),
    *("args_list", "args_broken", "args_space", "undeclared"),
    *("no_think_close", "leading_think", "second_close", "after_text", "between_text"),
    *("two_sections", "unclosed_section", "unclosed_call", "empty_section"),
    *("truncated", "spelled_marker", "other_special", "fragment", "noncanonical"),
]


class Completion(msgspec.Struct, kw_only=True):
    """`prior`: calls in the history, so the number that the next one should have."""

    name: str
    odd: str
    thinking: bool
    prior: int
    finish: str
    ids: list[int]

    def text(self, renderer: Renderer) -> str:
        """As a server decodes it: the stop token is not part of the text."""
        return renderer.tokenizer.decode(self.ids[:-1] if self._ended(renderer) else self.ids)

    def pieces(self, renderer: Renderer) -> list[str]:
        """One piece of text per token; bytes of an unfinished character wait for the rest."""
        tokenizer = renderer.tokenizer
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        ids = self.ids[:-1] if self._ended(renderer) else self.ids
        pieces = [
            decoder.decode(b"", True) + tokenizer.decode([i])
            if tokenizer.is_special(i)
            else decoder.decode(tokenizer.token_bytes(i))
            for i in ids
        ]
        return [p for p in [*pieces, decoder.decode(b"", True)] if p]

    def _ended(self, renderer: Renderer) -> bool:
        return bool(self.ids) and self.ids[-1] == renderer.end_id


def completions(renderer: Renderer, made_up: int, seed: int = 11) -> list[Completion]:
    """The golden ones, then `made_up` of our own; half of these are odd."""
    rows = []
    for row in golden("completions"):
        numbers = [int(n) for n in _CALL_NUMBER.findall(row["expect"]["text"])]
        counted = numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True
        rows.append(
            Completion(
                name=row["id"],
                odd="truncated"
                if row["expect"].get("truncated")
                else ""
                if counted
                else "index_high",
                thinking=row["input"]["thinking"],
                prior=numbers[0] if numbers else 0,
                finish="length" if row["expect"].get("truncated") else "stop",
                ids=row["expect"]["ids"],
            )
        )
    rng = random.Random(seed)
    for i in range(made_up):
        odd = ODD[i // 2 % len(ODD)] if i % 2 else ""
        rows.append(_made_up(rng, f"made-{i:05d}", odd, renderer))
    return rows


def words(rng: random.Random, least: int = 1, most: int = 30) -> str:
    count = rng.randint(least, most)
    parts = [rng.choice(WORDS) + rng.choice(["", " ", " ", " "]) for _ in range(count)]
    return "".join(parts)


def _arguments(rng: random.Random) -> str:
    value: dict[str, Any] = {
        rng.choice(["city", "query", "code", "path"]): words(rng, 0, 6) for _ in range(2)
    }
    if rng.random() < 0.3:
        value["n"] = rng.choice([1, -2.5, None, True, {"deep": [1, "}"]}])
    separators = rng.choice([(",", ":"), (", ", ": ")])
    return json.dumps(value, separators=separators, ensure_ascii=rng.random() < 0.2)


Part = tuple[bool, str]


def _calls(rng: random.Random, odd: str, prior: int) -> list[Part]:
    parts: list[Part] = [(True, SB)]
    count = 0 if odd == "empty_section" else rng.randint(1, 3) + (odd == "duplicate_id")
    for i in range(count):
        hit = odd if i == count - 1 else ""  # the last call is the odd one
        name = {"unicode_name": "天气", "undeclared": "other"}.get(hit) or rng.choice(NAMES)
        index = prior + i + (rng.randint(1, 9) if odd == "index_high" else 0)
        given = f"functions.{name}:{index}"
        if hit == "duplicate_id":
            given = parts[2][1]
        elif hit == "bare_counter":
            given = str(index)
        elif hit == "no_prefix":
            given = f"{name}:{index}"
        elif hit == "space_id":
            given = f" {given} "
        arguments = _arguments(rng)
        if hit == "args_list":
            arguments = f"[{arguments}]"
        elif hit == "args_broken":
            arguments = arguments[: len(arguments) // 2]
        elif hit == "args_space":
            arguments = rng.choice([" {}", "{} ", "\n{}\n"]).format(arguments)
        parts += [(True, B), (False, given), (True, A), (False, arguments)]
        if hit != "unclosed_call":
            parts.append((True, E))
        if hit == "between_text" or (odd == "between_text" and rng.random() < 0.5):
            parts.append((False, words(rng, 1, 3)))
    return parts if odd == "unclosed_section" else [*parts, (True, SE)]


def _made_up(rng: random.Random, name: str, odd: str, renderer: Renderer) -> Completion:
    thinking = odd in ("no_think_close", "leading_think") or rng.random() < 0.8
    prior = rng.choice([0, 0, 1, 4])
    about_calls = odd not in ("", "second_close", "other_special", "fragment", "leading_think")
    about_calls = about_calls and odd not in ("truncated", "spelled_marker", "noncanonical")
    parts: list[Part] = []
    if odd == "leading_think":
        parts.append((True, OPEN))
    if thinking:
        parts.append((False, words(rng, 0)))
        if odd != "no_think_close":
            parts.append((True, CLOSE))
    if odd != "no_think_close":
        parts.append((False, words(rng, 0 if about_calls else 1, 12)))
    if odd == "second_close":
        parts += [(True, CLOSE), (False, words(rng, 1, 3))]
    elif odd == "other_special":
        special = rng.choice(["<|im_user|>", "<|im_middle|>", "[EOS]", "<|media_pad|>"])
        parts += [(True, special), (False, words(rng, 1, 3))]
    elif odd == "spelled_marker":
        spelled = rng.choice([SB, CLOSE, B + "functions.search:0" + A + "{}" + E, "<|im_user|>"])
        parts.insert(rng.randrange(len(parts)), (False, f"{words(rng, 1, 3)}{spelled} so."))
    if about_calls or (odd != "fragment" and rng.random() < 0.5):
        parts += _calls(rng, odd, prior)
    if odd == "after_text":
        parts.append((False, words(rng, 1, 4)))
    elif odd == "two_sections":
        parts += _calls(rng, "", prior + 3)
    elif odd == "fragment":
        parts.append((False, rng.choice([SB, CLOSE, B])[:-4]))
    ids = _encoded([p for p in parts if p[1]], renderer, rng if odd == "noncanonical" else None)
    finish = "stop"
    if odd == "truncated":
        ids, finish = ids[: rng.randint(1, len(ids))], "length"
    else:
        ids.append(renderer.tokenizer.specials[END])
    return Completion(name=name, odd=odd, thinking=thinking, prior=prior, finish=finish, ids=ids)


def _encoded(parts: Sequence[Part], renderer: Renderer, rng: random.Random | None) -> list[int]:
    """Neighbouring texts are one text. With `rng`, one text is sampled in another split."""
    joined: list[Part] = []
    for is_marker, text in parts:
        if joined and not is_marker and not joined[-1][0]:
            text = joined.pop()[1] + text
        joined.append((is_marker, text))
    texts = [i for i, (is_marker, text) in enumerate(joined) if not is_marker and len(text) > 3]
    split = rng.choice(texts) if rng and texts else None
    ids: list[int] = []
    for i, (is_marker, text) in enumerate(joined):
        if is_marker:
            ids.append(renderer.tokenizer.specials[text])
        elif i == split and rng is not None:
            cut = rng.randrange(1, len(text))
            for half in (text[:cut], text[cut:]):
                ids += renderer.tokenizer.encode_ordinary(half)
        else:
            ids += renderer.tokenizer.encode_ordinary(text)
    return ids


class PromptCase(msgspec.Struct, kw_only=True):
    name: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    thinking: bool
    expected: list[int] | None = None
    """The checkpoint's own ids, for golden prompts."""


def prompts(made_up: int, seed: int = 12) -> list[PromptCase]:
    """The golden prompts, one per golden tool list, and `made_up` conversations."""
    cases = [
        PromptCase(name=row["id"], expected=row["expect"]["ids"], **row["input"])
        for row in golden("prompts")
        if row["kind"] != "template_only"
    ]
    for row in golden("tools"):
        ask = [{"role": "user", "content": "Go on."}]
        cases.append(
            PromptCase(name=row["id"], messages=ask, tools=row["input"]["tools"], thinking=True)
        )
    rng = random.Random(seed)
    for i in range(made_up):
        cases.append(
            PromptCase(
                name=f"talk-{i:05d}",
                messages=_talk(rng),
                tools=rng.sample(TOOLS, rng.randint(1, 4)) if rng.random() < 0.5 else None,
                thinking=rng.random() < 0.8,
            )
        )
    return cases


def _talk(rng: random.Random) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.4:
        messages.append({"role": "system", "content": words(rng)})
    number = 0
    for _ in range(rng.randint(0, 3)):
        messages.append({"role": "user", "content": words(rng)})
        for _ in range(rng.choice([0, 0, 1, 2])):
            turn: dict[str, Any] = {"role": "assistant", "content": words(rng, 0, 6)}
            if rng.random() < 0.6:
                turn["reasoning_content"] = words(rng)
            name = rng.choice(NAMES)
            given = f"functions.{name}:{number}"
            number += 1
            function = {"name": name, "arguments": _arguments(rng)}
            turn["tool_calls"] = [{"id": given, "type": "function", "function": function}]
            messages += [turn, {"role": "tool", "tool_call_id": given, "content": words(rng)}]
        if rng.random() < 0.7:
            answer: dict[str, Any] = {"role": "assistant", "content": words(rng)}
            if rng.random() < 0.5:
                answer["reasoning_content"] = words(rng)
            messages.append(answer)
    if not messages or messages[-1]["role"] != "tool":
        messages.append({"role": "user", "content": words(rng)})
    return messages
