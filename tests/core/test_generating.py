"""Whether a run goes on after generate: a table."""

import pytest

from core.errors import Halted, ProviderError, Tripped
from core.generate import GenerateResult
from core.pipeline.generating import reason_to_end

CANARY = "canary of birch on calls failed"


def result(reason: str, pending: int) -> GenerateResult:
    return GenerateResult(
        outcomes={"ok": 100 - pending},
        pending=pending,
        spent_usd=0.5,
        uncertain_usd=0.0,
        reason=reason,
        detail="why",
    )


@pytest.mark.parametrize(
    ("reason", "pending", "trips", "error", "says"),
    [
        ("", 0, [], None, ""),
        ("stopped", 10, [CANARY], None, ""),
        ("stopped", 11, [CANARY, CANARY], Tripped, f"{CANARY}; 89 replies kept, 11 prompts"),
        ("stopped", 1, [], ProviderError, "no provider left: why; 1 prompts pending"),
        ("halted", 5, [CANARY], Halted, "halted: why; 5 prompts pending, resume asks them"),
        ("budget", 5, [], Halted, "budget: why; 5 prompts pending, eyas resume RUN --set run."),
    ],
)
def test_a_run_ends_when_too_much_was_left_out(
    reason: str, pending: int, trips: list[str], error: type[Exception] | None, says: str
) -> None:
    ended = reason_to_end(result(reason, pending), 100, trips)
    if error is None:
        assert ended is None
    else:
        assert type(ended) is error
        assert str(ended).startswith(says)
