"""The audit stage with ground truth: where a server returned ids and text together, its replies
are rebuilt from the text alone and compared (spec: kimi 5, rebuild 6).

Knows where replies lie in a run; the audit knows what to make of them."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from core import events as ev
from core.audit import report
from core.audit.exactness import MEASURED, Pair, Side
from core.audit.reading import Asked
from core.config import Config
from core.reconstruct.judging import ask_of
from core.reconstruct.reply import read_reply
from core.reconstruct.truth import rebuilt_twice
from core.render.base import Renderer
from core.render.source import renderer_of
from core.schema import reply_text
from core.store import RunDir, read_jsonl

GIVES_IDS = ("sglang", "vllm", "openai")


def run(
    run: RunDir,
    config: Config,
    emit: Callable[[ev.Event], None],
    should_stop: Callable[[], bool],
) -> dict[str, Any]:
    """The audit's summary; see `core.audit.report.run`."""

    def truths(prompts: Mapping[str, Asked]) -> Iterator[Pair]:
        return pairs(run, prompts, renderer_of(config))

    return report.run(run, config, emit, should_stop, truths=truths)


class _Reply(msgspec.Struct, kw_only=True):
    prompt_id: str
    backend: str = ""
    outcome: str = ""
    status: int | None = None
    headers: dict[str, str] = {}
    request: msgspec.Raw = msgspec.Raw(b"{}")
    reply_kind: str = "none"
    reply_raw: str | None = None
    reply_zlib: bytes | msgspec.UnsetType = msgspec.UNSET


def pairs(run: RunDir, prompts: Mapping[str, Asked], renderer: Renderer) -> Iterator[Pair]:
    """One per prompt whose reply came whole, with ids; `MEASURED` of them at most."""
    if not any(p.backend in GIVES_IDS for p in prompts.values()):
        return
    seen: set[str] = set()
    for line in read_jsonl(run.completions, _Reply):
        asked = prompts.get(line.prompt_id)
        with_ids = line.backend in GIVES_IDS and line.outcome == "ok"
        if asked is None or not with_ids or line.prompt_id in seen:
            continue
        pair = _pair(line, asked, renderer)
        if pair is not None:
            seen.add(line.prompt_id)
            yield pair
        if len(seen) >= MEASURED:
            return


def _pair(line: _Reply, asked: Asked, renderer: Renderer) -> Pair | None:
    reply = read_reply(line.reply_kind, reply_text(line), line.status, line.headers)
    request = msgspec.json.decode(bytes(line.request))
    ask = ask_of(request, messages=[], thinking=asked.thinking)
    ask = msgspec.structs.replace(ask, prior_calls=asked.calls_before)
    twice = rebuilt_twice(reply, ask, renderer)
    if twice is None:
        return None
    return Pair(
        true=Side(twice.true.ids, twice.true.segments),
        told=Side(twice.told.ids, twice.told.segments),
        parsed=twice.parsed,
        consistent=twice.consistent,
    )
