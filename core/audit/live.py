"""The audit while the run is young: every judged reply becomes an observation, the wires and the
canary look at it.

`inspect` may run in another thread or process; `observe` and `fail` belong to one thread (the
engine's loop) and cost O(1). Nothing here stops anything: the caller acts on the trips.
"""

from collections.abc import Sequence

from core import config
from core.audit.canary import Canaries
from core.audit.reading import Reader, Toolboxes, asked
from core.audit.rules import WATCHED, Case, findings
from core.audit.tripwires import Observation, Tripwires
from core.conventions import COUNTED, is_suspect, stop_offset
from core.events import Canary, Tripwire
from core.render.base import Renderer
from core.schema import Finding, Prompt, Sample

LEAK_RULES = frozenset({"marker_leak", "marker_fragment", "special_in_text", "flag:spaced_markers"})
LEAK_CLASSES = frozenset(
    {
        "unknown_marker",
        "marker_fragment",
        "markers_unbalanced",
        "marker_in_reasoning",
        "control_string_in_output",
        "tool_section_noise",
        "tool_section_unterminated",
    }
)
SCHEMA_RULES = frozenset(
    {
        "undeclared_tool",
        "arguments_not_json",
        "arguments_not_object",
        "arguments_schema",
        "call_lost",
    }
)


class Inspector:
    """Looks at one sample at a time. Pure but for what it remembers of tool declarations."""

    def __init__(self, renderer: Renderer) -> None:
        self._reader = Reader(renderer)
        self._toolboxes = Toolboxes()

    def inspect(self, sample: Sample, prompt: Prompt) -> Observation:
        """What one sample shows."""
        case = Case(sample, asked(prompt, self._toolboxes), self._reader.read(sample))
        return observation(sample, findings(case, WATCHED), case.asked.tools is not None)


class LiveAudit:
    """Tripwires and canary of one run."""

    def __init__(self, settings: config.Config) -> None:
        names = [d.name for d in settings.dataset]
        self.wires = Tripwires(settings.tripwires, datasets=names)
        self.canaries = Canaries(settings.tripwires, settings.generate.canary)

    def observe(self, seen: Observation) -> list[Tripwire | Canary]:
        """Feed one observation; verdicts and trips that it caused, in order."""
        events: list[Tripwire | Canary] = []
        if verdict := self.canaries.observe(seen):
            events.append(verdict)
        self.wires.observe(seen)
        events += self.wires.check()
        return events

    def fail(self, provider: str, dataset: str, cost_usd: float = 0.0) -> list[Tripwire | Canary]:
        """An attempt that ended without a reply."""
        return self.observe(
            Observation(provider=provider, dataset=dataset, failed=True, cost_usd=cost_usd)
        )


def observation(sample: Sample, found: Sequence[Finding], has_tools: bool) -> Observation:
    """Reduce a sample and its findings to what the wires count."""
    rules = {f.rule for f in found}
    error = sample.error_class or ""
    counted = sample.verdict in COUNTED or error == "count_mismatch"
    offset = None if is_suspect(sample) else stop_offset(sample)
    truncated = "truncated" in rules or error == "truncated_length"
    broken_call = error.startswith("tool_")
    called = bool(sample.calls) or broken_call
    whole = not truncated and (sample.verdict != "rejected" or broken_call)
    billed = sample.prompt_tokens_billed
    return Observation(
        provider=sample.provider or sample.backend,
        dataset=sample.dataset,
        twin_id=sample.twin_id,
        reference=sample.arm == "local",
        failed=False,
        mismatch=sample.verdict in ("hypothesis", "mismatch") or error == "count_mismatch"
        if counted
        else None,
        stop_offset=offset if offset in (0, -1) else None,
        prompt_drift=None if billed is None or not sample.prompt_len else "prompt_drift" in rules,
        leak=bool(rules & LEAK_RULES) or error in LEAK_CLASSES,
        truncated=truncated,
        # With the server's ids a broken call is the target's own.
        schema_invalid=broken_call or bool(rules & SCHEMA_RULES)
        if called and sample.verdict != "exact"
        else None,
        triggered=called if has_tools and whole else None,
        prompt_tokens=billed or sample.prompt_len,
        completion_tokens=sample.billed_tokens or len(sample.completion_ids),
        kept=sample.trainable,
        cost_usd=sample.cost_usd or 0.0,
    )
