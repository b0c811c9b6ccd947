"""The audit stage: every sample checked against its prompt, arms compared, each dataset decided.

Reads prompts.jsonl and samples/; writes findings.jsonl and audit.json, both by rename. One pass, a
few hundred bytes kept a sample. Knows nothing of torch: log-probabilities come through a function
of the caller's, when the extract stage has stored them. So do replies rebuilt from their text
alone: how that is done is not the audit's business.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from core import events as ev
from core.audit.account import report
from core.audit.apply import apply, marked, marks
from core.audit.decide import DatasetDecision, decide
from core.audit.exactness import Exactness, Pair
from core.audit.reading import Asked, Reader, Toolboxes, asked_from_line
from core.audit.record import AuditReport, RuleCount, load_audit, save_audit
from core.audit.rules import Case, findings
from core.audit.semantics import Comparison, SemanticsReport, compare
from core.audit.traits import Trait, reduce, with_likelihood
from core.config import Config
from core.errors import Halted, StoreError
from core.render.source import renderer_of
from core.schema import Finding, Sample
from core.store import RunDir, encode_line, read_samples

__all__ = ["AuditReport", "apply", "load_audit", "marked", "marks", "report", "run"]

EVERY = 500
"""Samples between two progress events and looks at `should_stop`."""

Logprobs = Callable[[Sample], Sequence[float] | None]
"""Log-probability of each completion token under the target, or None for a sample that has none."""
Truths = Callable[[Mapping[str, Asked]], Iterable[Pair]]
"""Replies that came with their ids, beside their rebuild from text; prompts by id go in."""


def run(
    run: RunDir,
    config: Config,
    emit: Callable[[ev.Event], None],
    should_stop: Callable[[], bool],
    logprobs: Logprobs | None = None,
    truths: Truths | None = None,
) -> dict[str, Any]:
    """Audit a run. Returns the stage's summary. Raises Halted when asked to stop, StoreError for
    prompts that cannot be read; nothing is half-written."""
    renderer = renderer_of(config)
    prompts = _prompts(run)
    pass_ = _Pass(Reader(renderer), prompts, logprobs)
    with _replacing(run.findings) as out:
        for done, sample in enumerate(read_samples(run), 1):
            out.writelines(encode_line(finding) for finding in pass_.take(sample))
            if done % EVERY == 0:
                emit(ev.StageProgress(stage="audit", done=done, total=len(prompts)))
                if should_stop():
                    raise Halted("audit: stopped; resume begins it again")
    for number, pair in enumerate(truths(prompts) if truths else (), 1):
        pass_.exactness.add(pair, renderer.tokenizer)
        if number % EVERY == 0 and should_stop():
            raise Halted("audit: stopped; resume begins it again")
    pass_.exactness.settle()
    semantics = compare(pass_.traits, config.audit, config.tripwires)
    decisions = decide(pass_.traits, semantics, config.audit)
    audit = pass_.result(semantics, decisions, logprobs is not None)
    if run.audit.exists():
        audit.applied = _applied_before(run)
    save_audit(run, audit)
    event = ev.Audit(
        rows=rows(decisions, semantics),
        findings={c.rule: c.samples for c in audit.findings},
        exactness=pass_.exactness.summary(),
    )
    emit(event)
    return {
        "samples": audit.samples,
        "trainable": audit.trainable,
        "findings": sum(c.samples for c in audit.findings if c.severity == "error"),
        "rebuilt_exactly": pass_.exactness.rate,
        "decisions": {d.dataset: d.decision for d in decisions},
    }


class _Pass:
    """What one walk over the samples collects."""

    def __init__(
        self,
        reader: Reader,
        prompts: dict[str, Asked],
        logprobs: Logprobs | None,
    ) -> None:
        self._reader = reader
        self._prompts = prompts
        self._logprobs = logprobs
        self.traits: list[Trait] = []
        self.exactness = Exactness()
        self._rules: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)

    def take(self, sample: Sample) -> list[Finding]:
        """Findings of one sample; its trait is kept."""
        prompt = self._prompts.get(sample.prompt_id)
        if prompt is None:
            raise StoreError(
                f"sample {sample.sample_id}: its prompt is not in prompts.jsonl; rebuild samples"
            )
        reading = self._reader.read(sample)
        found = findings(Case(sample, prompt, reading))
        trait = reduce(sample, prompt, reading, found)
        values = self._logprobs(sample) if self._logprobs and reading.ids else None
        if values is not None:
            found += with_likelihood(trait, sample, reading, values)
        for rule, severity in {(f.rule, f.severity) for f in found}:
            self._rules[rule, severity][trait.provider] += 1
        self.traits.append(trait)
        return found

    def result(
        self, semantics: SemanticsReport, decisions: list[DatasetDecision], likelihood: bool
    ) -> AuditReport:
        verdicts: dict[str, Counter[str]] = defaultdict(Counter)
        classes: dict[str, Counter[str]] = defaultdict(Counter)
        for trait in self.traits:
            verdicts[trait.provider][trait.verdict] += 1
            if trait.error_class:
                classes[trait.error_class][trait.provider] += 1
        counts = [
            RuleCount(
                rule=rule, severity=severity, samples=c.total(), by_provider=dict(sorted(c.items()))
            )
            for (rule, severity), c in self._rules.items()
        ]
        order = {"error": 0, "warn": 1, "info": 2}
        trained = [t for t in self.traits if t.trainable]
        return AuditReport(
            samples=len(self.traits),
            trainable=len(trained),
            completion_tokens=sum(t.tokens for t in self.traits),
            trainable_tokens=sum(t.tokens for t in trained),
            verdicts={k: dict(sorted(v.items())) for k, v in sorted(verdicts.items())},
            classes={k: dict(sorted(v.items())) for k, v in sorted(classes.items())},
            findings=sorted(counts, key=lambda c: (order[c.severity], -c.samples, c.rule)),
            exactness=self.exactness,
            semantics=semantics,
            decisions=decisions,
            likelihood=likelihood,
        )


def rows(decisions: list[DatasetDecision], semantics: SemanticsReport) -> list[ev.AuditRow]:
    """The table that consoles show: one line per dataset, provider and arm."""
    compared = {(c.dataset, c.provider, c.arm): c for c in semantics.comparisons}
    found = []
    for decision in decisions:
        for scope in decision.scopes:
            row = ev.AuditRow(
                dataset=decision.dataset,
                provider=scope.provider,
                arm=scope.arm,
                samples=scope.samples,
                decision=scope.decision,
                reason=scope.reason,
            )
            one = compared.get((decision.dataset, scope.provider, scope.arm))
            found.append(_with_rates(row, one) if one else row)
    return found


def _with_rates(row: ev.AuditRow, one: Comparison) -> ev.AuditRow:
    mine, pair = one.twins or one.all, one.agreement
    return msgspec.structs.replace(
        row,
        trigger_rate=mine.trigger.value,
        reference_rate=one.reference.trigger.value if one.reference else None,
        p_value=pair.trigger_p if pair else None,
        schema_valid_rate=one.all.schema_valid.value,
        name_match_rate=pair.name_match.value if pair else None,
        args_match_rate=pair.args_match.value if pair else None,
    )


def _prompts(run: RunDir) -> dict[str, Asked]:
    """Every prompt, reduced. Raises StoreError with the line's number."""
    toolboxes = Toolboxes()
    found: dict[str, Asked] = {}
    try:
        with run.prompts.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    prompt = asked_from_line(line, toolboxes)
                except msgspec.MsgspecError as e:
                    raise StoreError(f"{run.prompts}:{number}: not a prompt ({e})") from e
                found[prompt.prompt_id] = prompt
    except OSError as e:
        raise StoreError(f"{run.prompts}: cannot be read ({e.strerror})") from e
    return found


def _applied_before(run: RunDir) -> list[dict[str, Any]]:
    try:
        return load_audit(run).applied
    except StoreError:
        return []  # an audit of another version: its history cannot be carried over


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """Write beside, rename at the end; an exception leaves the old file and nothing else."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
