"""Independent oracles for Kimi's tokens: `python -m tests.peers.tokens` prints every difference.

Peers: SGLang's kimi_k2 parsers (as shipped by `llm-router-utils`) for completions, whole and
streamed token by token, and Prime Intellect's `renderers` for prompt ids and completions. Each
difference has a cause in CAUSES below, which says who is right and why; one without a cause fails
the tests.

What is compared:
    parse    eyas reads the ids; SGLang's parsers read the text of the same ids
    stream   the same, text fed one token at a time
    gateway  the embedded gateway's own reading against SGLang's, whole text
    rebuild  eyas rebuilds ids from SGLang's fields and the true count; truth: the ids. A verdict
             `consistent` with other ids is a difference
    read     eyas reads the ids; renderers reads the same ids
    render   eyas and renderers render the same conversation; truth: the golden ids, where there are
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from core.embedded.replies import Mode, parse
from core.errors import RenderError
from core.reconstruct.rebuild import Ask, Rebuilt, rebuild
from core.reconstruct.reply import Reply
from core.render.base import RenderedPrompt, Renderer
from core.render.tokenizer import chunk_cuts
from core.schema import ToolCall, Usage
from tests.kimi_files import kimi_renderer
from tests.peers.causes import CAUSES
from tests.peers.inputs import TOOLS, Completion, PromptCase, completions, prompts
from tests.peers.peer import ask_peers

MADE_UP = 1_500
TALKS = 300
OTHER = {"type": "function", "function": {"name": "other", "parameters": {}}}


class Difference(NamedTuple):
    what: str
    name: str
    cause: str | None
    mine: Any
    theirs: Any


class Outcome(msgspec.Struct):
    """`compared`: inputs by comparison. `verdicts`: of rebuilding from SGLang's text."""

    compared: Counter[str]
    verdicts: Counter[str]
    differences: list[Difference]

    @property
    def unexplained(self) -> list[Difference]:
        return [d for d in self.differences if d.cause is None]


class Fields(NamedTuple):
    """What a reader makes of a completion. `calls`: (id, name, arguments)."""

    reasoning: str
    content: str
    calls: list[tuple[str, str, str]]

    @classmethod
    def of(cls, answer: dict[str, Any]) -> "Fields":
        calls = [tuple(c[:3]) for c in answer["calls"]]
        return cls(answer["reasoning"], answer["content"], calls)


def compare() -> Outcome:
    """Everything, in one process of the peers."""
    renderer = kimi_renderer()
    outcome = Outcome(Counter(), Counter(), [])
    for difference in _completions(renderer, outcome):
        outcome.differences.append(difference)
    for difference in _prompts(renderer, outcome):
        outcome.differences.append(difference)
    return outcome


def _completions(renderer: Renderer, outcome: Outcome) -> Iterator[Difference]:
    cases = completions(renderer, MADE_UP)
    rows: list[dict[str, Any]] = []
    user = [{"role": "user", "content": "x"}]
    for case in cases:
        how = {"tools": [*TOOLS, OTHER], "thinking": case.thinking, "prior": case.prior}
        prompt = renderer.render(user, None, case.thinking).ids
        rows += [
            {"op": "parse", "text": case.text(renderer), **how},
            {"op": "stream", "pieces": case.pieces(renderer), **how},
            {"op": "read", "ids": case.ids, "prompt": prompt},
        ]
    answers = ask_peers(rows)
    for i, case in enumerate(cases):
        whole, streamed, read = answers[3 * i : 3 * i + 3]
        usage = Usage(completion_tokens=len(case.ids))
        mine = rebuild(Reply(ids=case.ids, finish=case.finish, usage=usage), _ask(case), renderer)
        found = {
            "parse": _parsed(case, mine, _fields(mine, renderer), Fields.of(whole)),
            "stream": _streamed(case, Fields.of(whole), Fields.of(streamed)),
            "gateway": _gateway(case, mine, renderer, Fields.of(whole)),
            "rebuild": _rebuilt(case, whole, renderer, outcome.verdicts),
            "read": _read(case, mine, _fields(mine, renderer), read),
        }
        for what, difference in found.items():
            outcome.compared[what] += 1
            if difference is not None:
                cause, ours, theirs = difference
                yield Difference(what, case.name, cause, ours, theirs)


def _ask(case: Completion) -> Ask:
    return Ask(thinking=case.thinking, prior_calls=case.prior, allowed=(0,))


def _fields(rebuilt: Rebuilt, renderer: Renderer) -> Fields:
    texts = {"reasoning": "", "content": ""}
    for segment in rebuilt.segments:
        if segment.kind in texts:
            texts[segment.kind] += renderer.tokenizer.decode(
                rebuilt.ids[segment.start : segment.end]
            )
    calls = [(c.id, c.name, c.arguments) for c in rebuilt.calls]
    return Fields(texts["reasoning"], texts["content"], calls)


Found = tuple[str | None, Any, Any] | None


def _parsed(case: Completion, read: Rebuilt, mine: Fields, theirs: Fields) -> Found:
    if mine == theirs:
        return None
    if read.verdict != "exact":
        return "rejected", (read.error_class, mine), theirs
    cause = None
    ours, told = mine.calls, theirs.calls
    if mine[:2] == theirs[:2] and len(ours) == len(told):
        numbered = [f"functions.{name}:{case.prior + i}" for i, (_, name, _) in enumerate(told)]
        if [c[1:] for c in ours] == [c[1:] for c in told] and [c[0] for c in told] == numbered:
            cause = "id_rewritten"
        elif [(i.strip(), n, a.strip()) for i, n, a in ours] == told:
            cause = "blanks_dropped"
    if cause is None and case.odd == "spelled_marker":
        cause = "spelled_marker"
    return cause, mine, theirs


def _streamed(case: Completion, whole: Fields, streamed: Fields) -> Found:
    if whole == streamed:
        return None
    cause = None
    same_texts = whole[:2] == streamed[:2]
    if same_texts and len(streamed.calls) >= len(whole.calls) and case.odd != "args_space":
        cause = "stream_partial_call"
    elif same_texts and whole.calls == [(i, n, a.strip()) for i, n, a in streamed.calls]:
        cause = "blanks_dropped"
    elif case.odd in ("after_text", "between_text"):
        cause = "stream_late_text"
    elif whole.content in (streamed.content + "<|", f"{streamed.content}<|tool") or (
        case.odd == "fragment" and whole.content.startswith(streamed.content)
    ):
        cause = "stream_lost_tail"
    elif case.odd == "spelled_marker":
        cause = "spelled_marker"
    return cause, whole, streamed


def _gateway(case: Completion, read: Rebuilt, renderer: Renderer, theirs: Fields) -> Found:
    parsed = parse(case.text(renderer), Mode(thinking=case.thinking, calls=True))
    calls = [(c.id, c.name, c.arguments) for c in parsed.calls]
    mine = Fields(parsed.reasoning, parsed.content, calls)
    if mine == theirs:
        return None
    cause = None
    if mine[:2] == theirs[:2] and [c[1:] for c in calls] == [c[1:] for c in theirs.calls]:
        cause = "gateway_keeps_index"
    elif read.verdict != "exact":
        cause = "gateway_stricter"
    elif case.odd == "spelled_marker":
        cause = "spelled_marker"
    return cause, mine, theirs


COUNT_BLIND = ("index_high", "duplicate_id", "args_space", "noncanonical")


def _rebuilt(
    case: Completion, whole: dict[str, Any], renderer: Renderer, verdicts: Counter[str]
) -> Found:
    fields = Fields.of(whole)
    reply = Reply(
        reasoning=fields.reasoning,
        content=fields.content,
        calls=[ToolCall(id=i, name=n, arguments=a) for i, n, a in fields.calls],
        finish=case.finish if case.finish == "length" else whole["finish"],
        usage=Usage(completion_tokens=len(case.ids)),
    )
    told = rebuild(reply, _ask(case), renderer)
    same = "same ids" if told.ids == case.ids else "other ids"
    verdict = told.error_class if told.verdict == "rejected" else told.verdict
    verdicts[f"{'damaged' if case.odd else 'clean'}: {verdict}, {same}"] += 1
    if told.verdict != "consistent" or told.ids == case.ids:
        return None
    cause = "count_blind" if case.odd in COUNT_BLIND else None
    return cause, case.text(renderer), fields


def _read(case: Completion, read: Rebuilt, mine: Fields, answer: dict[str, Any]) -> Found:
    if "error" in answer:
        return ("rejected" if read.verdict != "exact" else None), mine, answer
    texts = (answer["reasoning"], answer["content"])
    told = [(c[0], c[1]) for c in answer["calls"]]
    values = [c[2] for c in answer["calls"]]
    if texts == mine[:2] and not mine.calls and not told:
        return None
    cause = None
    if read.verdict != "exact":
        cause = "rejected"
    elif case.odd == "spelled_marker":
        cause = "spelled_marker"
    elif told == [(i, n) for i, n, _ in mine.calls] and values == [
        _loads(c[2]) for c in mine.calls
    ]:
        if texts == mine[:2]:
            cause = "reader_parses_arguments"
        elif texts == (mine.reasoning.strip(), mine.content.strip()):
            cause = "reader_strips"
    return cause, mine, answer


def _loads(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments.strip()


def _prompts(renderer: Renderer, outcome: Outcome) -> Iterator[Difference]:
    cases = prompts(TALKS)
    rows: list[dict[str, Any]] = []
    for case in cases:
        ask = {"op": "render", "messages": case.messages, "thinking": case.thinking}
        rows += [{**ask, "tools": case.tools}, {**ask, "tools": _sorted_keys(case.tools)}]
    answers = ask_peers(rows)
    for i, case in enumerate(cases):
        theirs, after_sorting = answers[2 * i : 2 * i + 2]
        try:
            mine = renderer.render(case.messages, case.tools, case.thinking)
        except RenderError:
            outcome.compared["render, refused by eyas"] += 1
            continue
        outcome.compared["render"] += 1
        if case.expected is not None and mine.ids == theirs.get("ids"):
            assert mine.ids == case.expected, f"{case.name}: both differ from the checkpoint"
        if mine.ids != theirs.get("ids"):
            cause = _render_cause(case, mine, theirs, after_sorting, renderer)
            told = theirs.get("error") or renderer.tokenizer.decode(theirs["ids"])
            yield Difference("render", case.name, cause, mine.text, told)


def _render_cause(
    case: PromptCase,
    mine: RenderedPrompt,
    theirs: dict[str, Any],
    after_sorting: dict[str, Any],
    renderer: Renderer,
) -> str | None:
    if mine.control_strings:
        return "marker_in_text"
    if case.expected is not None and mine.ids != case.expected:
        return None  # apart from markers in text, the checkpoint is right
    if mine.tools_mode == "json":
        return "json_fallback"
    if after_sorting.get("ids") == mine.ids:
        return "keys_not_sorted"
    if "dictionary changed size" in theirs.get("error", ""):
        return "defs_change"
    if "ids" not in theirs:
        return None
    text = renderer.tokenizer.decode(theirs["ids"])
    if text == mine.text:
        return "long_run" if chunk_cuts(text) else "encoded_in_pieces"
    reasoned = any(m.get("reasoning_content") for m in case.messages)
    if not case.thinking and reasoned and _without_thoughts(text) == _without_thoughts(mine.text):
        return "thinking_off"
    return _tool_cause(case.tools or [], mine.text, text)


def _without_thoughts(text: str) -> str:
    kept = [part.partition("</think>")[2] for part in text.split("<think>")[1:]]
    return text.partition("<think>")[0] + "".join(kept)


def _tool_cause(tools: list[dict[str, Any]], mine: str, theirs: str) -> str | None:
    if any(t.get("type") != "function" or not t.get("function") for t in tools):
        return "not_a_function"
    spelled = {"True": "true", "False": "false", "None": "null", "'": '"'}
    for python, plain in spelled.items():
        mine, theirs = mine.replace(python, plain), theirs.replace(python, plain)
    return "python_spelling" if mine == theirs else None


def _sorted_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sorted_keys(value[key]) for key in sorted(value)}
    return [_sorted_keys(v) for v in value] if isinstance(value, list) else value


def show(outcome: Outcome, out: Console) -> None:
    counts: dict[tuple[str, str], list[str]] = defaultdict(list)
    for d in outcome.differences:
        counts[d.what, d.cause or "UNEXPLAINED"].append(d.name)
    equal = Counter(outcome.compared)
    for (what, _), names in counts.items():
        equal[what] -= len(names)
    table = Table("compared", "inputs", "equal", "different", "cause", "right", "why", "first")
    for what in outcome.compared:
        rows = sorted((c, n) for (w, c), n in counts.items() if w == what)
        table.add_row(what, str(outcome.compared[what]), str(equal[what]))
        for cause, names in rows:
            right, why = CAUSES.get(cause, ("?", "?"))
            table.add_row("", "", "", str(len(names)), cause, right, why, names[0])
    out.print(table)
    verdicts = Table("rebuilt from SGLang's text", "completions")
    for verdict, count in sorted(outcome.verdicts.items()):
        verdicts.add_row(verdict, str(count))
    out.print(verdicts)
    for d in outcome.unexplained:
        out.print(
            f"UNEXPLAINED {d.what} {d.name}\n  eyas  {d.mine!r}\n  peer  {d.theirs!r}", markup=False
        )


def main() -> int:
    outcome = compare()
    show(outcome, Console(width=180))
    return 1 if outcome.unexplained else 0


if __name__ == "__main__":
    raise SystemExit(main())
