"""Records as a full-size run writes them: replies of 2,000 tokens in OpenRouter's shape, whole or
streamed token by token, cut from the project's own prose and code. Real text, so that sizes and
compression are real."""

import itertools
import random
import re
from collections.abc import Iterator
from pathlib import Path

from msgspec import UNSET

from core.embedded import openrouter_wire as wire
from core.embedded.billing import PROVIDERS, Charge
from core.embedded.faults import Hits
from core.embedded.replies import Delta, Parsed
from core.schema import Rollout, SpendLine, Timings, Usage, pack_reply

TOKENS = 2_000
REASONING_TOKENS = 1_200
PROMPT_TOKENS = 500
COST_USD = 0.001
ROOT = Path(__file__).parents[2]
_PIECE = re.compile(r"\s?\w{1,8}|\s+|[^\w\s]{1,2}")


def text_pieces(seed: int) -> Iterator[str]:
    """Pieces of about the size of a token of a 160,000-word vocabulary: 4 characters."""
    files = [ROOT / "README.md", *sorted((ROOT / "core").rglob("*.py"))]
    text = "\n".join(path.read_text() for path in files)
    start = random.Random(seed).randrange(len(text) - 200_000)
    return iter(_PIECE.findall(text, start, start + 40_000))


def rollout(number: int, streamed: bool) -> Rollout:
    pieces = text_pieces(number)
    prompt = "".join(itertools.islice(pieces, PROMPT_TOKENS))
    reasoning = list(itertools.islice(pieces, REASONING_TOKENS))
    content = list(itertools.islice(pieces, TOKENS - REASONING_TOKENS))
    charge = Charge(
        id=f"gen-1767000000-{number:020x}",
        provider="Moonshot AI",
        model="moonshotai/kimi-k2.5-0127",
        streamed=streamed,
        created=1_767_000_000.0,
        prompt_tokens=PROMPT_TOKENS,
        hold_pico=0,
        completion_tokens=TOKENS,
        reasoning_tokens=REASONING_TOKENS,
        cost_pico=round(COST_USD * 1e12),
    )
    raw = _raw(charge, reasoning, content, streamed)
    return Rollout(
        prompt_id=f"{number:064x}",
        twin_id=f"{number:016x}",
        dataset=f"b{1 + number % 8}",
        arm="declared",
        attempt=1,
        outcome="ok",
        backend="openrouter",
        provider="Moonshot AI",
        model=charge.model,
        generation_id=charge.id,
        request={
            "model": "moonshotai/kimi-k2.5",
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": 8_192,
            "temperature": 1.0,
            "stream": streamed,
            "provider": {"only": ["moonshotai"], "quantizations": ["int4"]},
        },
        status=200,
        headers={"content-type": "application/json", "x-generation-id": charge.id},
        reply_kind="sse" if streamed else "json",
        reply_raw=None if streamed else raw.decode(),
        reply_zlib=pack_reply(raw) if streamed else UNSET,
        usage=Usage(
            prompt_tokens=PROMPT_TOKENS,
            completion_tokens=TOKENS,
            reasoning_tokens=REASONING_TOKENS,
            cached_tokens=0,
            cost_usd=COST_USD,
            cap_usd=COST_USD,
        ),
        bill="billed",
        timings=Timings(sent_at=1_767_000_000.5, total_s=41.5, ttft_s=0.8),
    )


def _raw(charge: Charge, reasoning: list[str], content: list[str], streamed: bool) -> bytes:
    reply, hits = Parsed(reasoning="".join(reasoning), content="".join(content)), Hits()
    if not streamed:
        return wire.body(charge, PROVIDERS[0], reply, hits)
    opening = wire.head(charge)
    deltas = [Delta("reasoning", t) for t in reasoning] + [Delta("content", t) for t in content]
    usage = wire.dumps(wire.usage(charge, hits))
    return b"".join(
        (
            wire.COMMENT,
            wire.events(opening, deltas),
            wire.event(opening, wire.finish_tail(reply, hits)),
            wire.event(opening, b'"choices":[],"usage":' + usage + b"}"),
            wire.DONE,
        )
    )


def spend_lines(number: int, streamed: bool) -> list[SpendLine]:
    """What the books hold of a finished prompt."""
    about = {
        "ts": 1_767_000_000.0,
        "prompt_id": f"{number:064x}",
        "attempt": 1,
        "backend": "openrouter",
        "provider": "Moonshot AI",
    }
    generation_id = f"gen-1767000000-{number:020x}"
    lines = [SpendLine(kind="dispatch", reserve_usd=0.02, **about)]
    if streamed:
        lines.append(SpendLine(kind="known", generation_id=generation_id, **about))
    billed = SpendLine(
        kind="billed",
        generation_id=generation_id,
        cost_usd=COST_USD,
        cap_usd=COST_USD,
        **about,
    )
    return [*lines, billed]
