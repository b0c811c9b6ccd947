"""Runs in the peers' own environment: JSON lines in, JSON lines out. Knows nothing of eyas.

    python worker.py TOKENIZER_DIR
    {"op": "parse",  "text", "tools", "thinking", "prior"}   SGLang's kimi_k2 parsers, whole text
    {"op": "stream", "pieces", "tools", "thinking", "prior"} the same, one piece per token
    {"op": "render", "messages", "tools", "thinking"}        Prime Intellect's renderers: prompt ids
    {"op": "read",   "ids", "prompt"}                        their reading of completion ids

`llm-router-utils` carries SGLang's parsers and the part of its chat endpoint that numbers calls;
the few lines that join them there stand in `Kimi` below. `renderers` takes any tokenizer object:
here tiktoken over the checkpoint's own files, specials recognised, as the checkpoint encodes by
default."""

import base64
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tiktoken
from llm_router_utils.sglang.srt.entrypoints.openai.protocol import Tool
from llm_router_utils.sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from llm_router_utils.sglang.srt.function_call.function_call_parser import FunctionCallParser
from llm_router_utils.sglang.srt.parser.reasoning_parser import ReasoningParser
from renderers.configs import KimiK25RendererConfig
from renderers.kimi_k25 import KimiK25Renderer

PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
RESERVED = 256


class PlainTokenizer:
    """What `renderers` asks of a tokenizer, over tiktoken."""

    unk_token_id = None
    eos_token_id = None

    def __init__(self, folder: Path) -> None:
        ranks = {}
        for line in (folder / "tiktoken.model").read_bytes().splitlines():
            piece, rank = line.split()
            ranks[base64.b64decode(piece)] = int(rank)
        named = json.loads((folder / "tokenizer_config.json").read_text())["added_tokens_decoder"]
        self.specials = {
            named.get(str(i), {}).get("content", f"<|reserved_token_{i}|>"): i
            for i in range(len(ranks), len(ranks) + RESERVED)
        }
        self._model = tiktoken.Encoding(
            name="peer", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=self.specials
        )

    def encode(self, text: str, **_: Any) -> list[int]:
        return self._model.encode(text, allowed_special="all")

    def decode(self, ids: list[int], **_: Any) -> str:
        return self._model.decode(ids)

    def convert_tokens_to_ids(self, token: str) -> int | None:
        return self.specials.get(token)


class Kimi:
    """Reasoning parser, then tool parser, then the call's id: the order of SGLang's chat
    endpoint."""

    tool_call_parser = "kimi_k2"
    tokenizer_manager = SimpleNamespace(tokenizer=None)
    _process_tool_call_id = OpenAIServingChat._process_tool_call_id

    def whole(self, text: str, tools: list[Tool], thinking: bool, prior: int) -> dict[str, Any]:
        reasoning = ""
        if thinking:
            parser = ReasoningParser("kimi_k2", stream_reasoning=False, force_reasoning=True)
            reasoning, text = parser.parse_non_stream(text)
        finish = {"type": "stop"}
        calls = []
        if tools:
            process = OpenAIServingChat._process_tool_calls
            found, text, finish = process(self, text, tools, finish, "auto", prior)
            calls = [(c.id, c.function.name, c.function.arguments) for c in found or ()]
        return reply(reasoning or "", text or "", calls, finish["type"])

    def streamed(
        self, pieces: list[str], tools: list[Tool], thinking: bool, prior: int
    ) -> dict[str, Any]:
        reasoner = ReasoningParser("kimi_k2", stream_reasoning=True, force_reasoning=True)
        caller = FunctionCallParser(tools, "kimi_k2")
        reasoning, content = [], []
        calls: dict[int, list[str]] = {}

        def take(text: str, items: list[Any]) -> None:
            content.append(text or "")
            for item in items:
                call = calls.setdefault(item.tool_index, ["", "", ""])
                if item.name:
                    call[0], call[1] = self._process_tool_call_id(item, prior), item.name
                call[2] += item.parameters or ""

        for piece in pieces:
            text = piece
            if thinking:
                thought, text = reasoner.parse_stream_chunk(piece)
                reasoning.append(thought or "")
            if text:
                take(*(caller.parse_stream_chunk(text) if tools else (text, [])))
        if thinking:
            last = reasoner.detector.finish()
            reasoning.append(last.reasoning_text)
            if last.normal_text:
                take(*(caller.parse_stream_chunk(last.normal_text) if tools else ("", [])))
        if tools:
            take(*caller.parse_stream_end())
        made = [tuple(calls[i]) for i in sorted(calls)]
        return reply("".join(reasoning), "".join(content), made, "tool_calls" if made else "stop")


def reply(reasoning: str, content: str, calls: list[Any], finish: str) -> dict[str, Any]:
    return {"reasoning": reasoning, "content": content, "calls": calls, "finish": finish}


class Peers:
    def __init__(self, folder: Path) -> None:
        self._sglang = Kimi()
        tokenizer = PlainTokenizer(folder)
        self._renderers = {
            thinking: KimiK25Renderer(tokenizer, KimiK25RendererConfig(thinking=thinking))
            for thinking in (True, False)
        }

    def answer(self, row: dict[str, Any]) -> dict[str, Any]:
        if row["op"] == "render":
            renderer = self._renderers[row["thinking"]]
            ids = renderer.render_ids(
                row["messages"], tools=row["tools"], add_generation_prompt=True
            )
            return {"ids": ids}
        if row["op"] == "read":
            parsed = self._renderers[True].parse_response(row["ids"], prompt_ids=row["prompt"])
            calls = [
                (c.id, c.name, c.arguments, str(c.status.value)) for c in parsed.tool_calls or ()
            ]
            return reply(parsed.reasoning_content or "", parsed.content or "", calls, "")
        tools = [Tool.model_validate(t) for t in row["tools"] or ()]
        how = (tools, row["thinking"], row["prior"])
        if row["op"] == "parse":
            return self._sglang.whole(row["text"], *how)
        return self._sglang.streamed(row["pieces"], *how)


def main() -> None:
    peers = Peers(Path(sys.argv[1]))
    for line in sys.stdin:
        try:
            answer = peers.answer(json.loads(line))
        except Exception as e:  # what a peer raises is its answer
            answer = {"error": f"{type(e).__name__}: {e}"[:200]}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
