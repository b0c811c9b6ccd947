"""A real SGLang with its kimi_k2 parsers: `python -m tests.servers.sglang_kimi`.

Two servers, one after the other, both on this machine's CPU:
    prompts   a small random Llama under Kimi's real tokenizer: for 200 conversations, the prompt
              ids that the server made of our request are the ones that eyas renders
    truth     the built-in target model, which really thinks and calls, under the same parsers: a
              run of eyas through `chat` and one through `/generate`, audited, with the exactness of
              rebuilding from text
Prints what differs and returns 1 when a difference has no cause.
"""

import asyncio
import json
import sys
import tempfile
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from core.config import parse
from core.generate.request import prepare
from core.providers.base import CompletionRequest
from core.providers.sglang import SGLang
from core.render.base import RenderedPrompt, Renderer
from core.schema import Prompt, Sampling
from core.store import RunDir, read_samples
from tests.kimi_files import kimi_renderer
from tests.peers.inputs import PromptCase, prompts
from tests.servers.eyas_run import audited, eyas_run
from tests.servers.kimi_model import embedded_target, random_kimi
from tests.servers.serving import free_port, served, sglang

PARSERS = (
    "--trust-remote-code",
    *("--tool-call-parser", "kimi_k2", "--reasoning-parser", "kimi_k2"),
    *("--max-total-tokens", "40000"),
)
ASKED = 200
QUESTIONS = 200
LONGEST = 6_000
"""Prompt tokens; longer ones would take minutes each on a CPU."""

CAUSES = {
    "arguments_rewritten": "SGLang parses the arguments of old calls and prints them its own way",
    "json_fallback": "SGLang fills in default fields of every tool; a JSON declaration shows them",
    "name_dropped": "SGLang's chat endpoint does not hand `name` on to the template",
    "list_joined": "SGLang joins a tool result's list of texts with blanks",
}


class Compared(NamedTuple):
    """`theirs`: as the server renders the messages; `bound`: when our ids go with them."""

    case: PromptCase
    ours: RenderedPrompt
    theirs: list[int]
    bound: list[int]

    @property
    def cause(self) -> str | None:
        """Why the server renders something else; empty: it does not."""
        return "" if self.ours.ids == self.theirs else _cause(self.case, self.ours)


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=300) as reply:
            return dict(json.loads(reply.read()))
    except urllib.error.HTTPError as e:
        return {"refused": f"HTTP {e.code}: {e.read()[:300].decode('utf-8', 'replace')}"}


async def provider(url: str) -> SGLang:
    """For the bodies that it would send; its connections are not used."""
    generate = {"sglang": {"urls": [url], "endpoint": "chat"}}
    dataset = [{"name": "d", "kind": "embedded"}]
    made = SGLang(parse({"generate": generate, "dataset": dataset}, "test"))
    await made.close()
    return made


def compared(url: str, renderer: Renderer, equal: int = ASKED) -> Iterator[Compared]:
    """The request that eyas would send, until `equal` of them were rendered alike. What the server
    refuses (schemas that are no JSON schema) is left out."""
    server = asyncio.run(provider(url))
    for case in prompts(2 * equal):
        prepared = prepare(_prompt(case), renderer, sends_messages=True)
        if prepared.refusal or len(prepared.ids) > LONGEST:
            continue
        ours = renderer.render(prepared.prompt.messages, case.tools, case.thinking)
        request = CompletionRequest(
            request_id=case.name,
            prompt=prepared.prompt,
            prompt_ids=prepared.ids,
            sampling=Sampling(max_tokens=1),
        )
        body = server.body(request)
        bound = _prompt_ids(url, body)
        theirs = _prompt_ids(url, {k: v for k, v in body.items() if k != "input_ids"})
        if bound is None or theirs is None:
            continue
        yield Compared(case, ours, theirs, bound)
        equal -= ours.ids == theirs
        if not equal:
            return


def _prompt_ids(url: str, body: dict[str, Any]) -> list[int] | None:
    reply = post(f"{url}/v1/chat/completions", body)
    return None if "refused" in reply else reply["choices"][0]["prompt_token_ids"]


def _prompt(case: PromptCase) -> Prompt:
    return Prompt(
        prompt_id=case.name,
        twin_id=case.name,
        dataset="d",
        arm="local",
        backend="sglang",
        messages=case.messages,
        tools=case.tools,
        thinking=case.thinking,
    )


def _cause(case: PromptCase, ours: RenderedPrompt) -> str | None:
    calls = [c for m in case.messages for c in m.get("tool_calls") or ()]
    told = [c["function"]["arguments"] for c in calls]
    texts = [a for a in told if isinstance(a, str)]
    if ours.tools_mode == "json":
        return "json_fallback"
    if any(json.dumps(json.loads(a), ensure_ascii=False) != a for a in texts):
        return "arguments_rewritten"
    if any("name" in m for m in case.messages):
        return "name_dropped"
    if any(m["role"] == "tool" and isinstance(m.get("content"), list) for m in case.messages):
        return "list_joined"
    return None


def show_prompts(found: list[Compared], renderer: Renderer) -> int:
    bound = sum(c.ours.ids == c.bound for c in found)
    same = sum(c.cause == "" for c in found)
    print(
        f"prompt ids, as eyas asks (messages and ids): {bound} of {len(found)} equal the server's"
    )
    print(f"prompt ids, messages alone: {same} of {len(found)} equal the server's")
    for cause, count in Counter(c.cause for c in found if c.cause != "").most_common():
        print(f"  {count:4d} differ: {cause or 'NO CAUSE'}: {CAUSES.get(cause or '', '')}")
    unexplained = [c for c in found if c.cause is None or c.ours.ids != c.bound]
    decode = renderer.tokenizer.decode
    for c in unexplained[:5]:
        print(f"  {c.case.name}: ours   {decode(c.ours.ids)[-300:]!r}")
        print(f"  {c.case.name}: theirs {decode(c.theirs)[-300:]!r}")
    return len(unexplained)


def truth_runs(url: str, folder: Path) -> dict[str, RunDir]:
    """The same questions through both endpoints of a server that gives text and ids."""
    runs = {}
    for endpoint in ("chat", "generate"):
        dataset = {"name": "local", "kind": "embedded", "limit": QUESTIONS, "arm": "local"}
        config = {
            "target": {"kind": "embedded", "variant": "kimi-k2.5"},
            "dataset": [{**dataset, "backend": "sglang"}],
            "generate": {
                **{"max_in_flight": 8, "max_tokens": 256, "temperature": 1.0, "canary": 4},
                "sglang": {"urls": [url], "endpoint": endpoint},
            },
            "tripwires": {"schema_invalid_rate": 0.9, "truncation_rate": 0.9},
        }
        runs[endpoint] = eyas_run(folder, endpoint, config)
    return runs


def show_truth(runs: dict[str, RunDir]) -> None:
    for endpoint, run in runs.items():
        samples = list(read_samples(run))
        verdicts = Counter(s.error_class or s.verdict for s in samples)
        print(f"{endpoint}: {len(samples)} samples, {dict(verdicts.most_common())}")
        print(audited(run))


def main() -> int:
    renderer = kimi_renderer()
    with tempfile.TemporaryDirectory(prefix="eyas-sglang-") as name:
        folder = Path(name)
        model, port = random_kimi(folder / "random"), free_port()
        with served(sglang(model, port, *PARSERS), port, folder / "random.log") as url:
            wrong = show_prompts(list(compared(url, renderer)), renderer)
        model, port = embedded_target(folder / "embedded"), free_port()
        with served(sglang(model, port, *PARSERS), port, folder / "embedded.log") as url:
            show_truth(truth_runs(url, folder))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
