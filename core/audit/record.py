"""audit.json: what one audit found, and what was applied since. Reading and writing it, nothing
else."""

from typing import Any

import msgspec

from core.audit.decide import DatasetDecision
from core.audit.exactness import Exactness
from core.audit.semantics import SemanticsReport
from core.errors import StoreError
from core.store import RunDir, write_atomic

VERSION = 1


class RuleCount(msgspec.Struct, kw_only=True):
    rule: str
    severity: str
    samples: int
    by_provider: dict[str, int] = {}


class AuditReport(msgspec.Struct, kw_only=True):
    """`verdicts`: per provider. `likelihood`: whether the target's own log-probabilities were
    there."""

    v: int = VERSION
    samples: int
    trainable: int
    completion_tokens: int
    trainable_tokens: int
    verdicts: dict[str, dict[str, int]]
    classes: dict[str, dict[str, int]]
    findings: list[RuleCount]
    exactness: Exactness
    semantics: SemanticsReport
    decisions: list[DatasetDecision]
    likelihood: bool = False
    applied: list[dict[str, Any]] = []


def load_audit(run: RunDir) -> AuditReport:
    """Raises StoreError when the run has no readable audit."""
    try:
        return msgspec.json.decode(run.audit.read_bytes(), type=AuditReport)
    except FileNotFoundError as e:
        raise StoreError(
            f"{run.audit}: not there; run `eyas stage audit --run {run.run_id}`"
        ) from e
    except (OSError, msgspec.MsgspecError) as e:
        raise StoreError(f"{run.audit}: cannot be read ({e}); audit the run again") from e


def save_audit(run: RunDir, audit: AuditReport) -> None:
    write_atomic(run.audit, msgspec.json.format(msgspec.json.encode(audit), indent=1) + b"\n")
