"""status.json from the view: the headline numbers of a run in one small record. Pure."""

import os
import time

from core.store import Status
from core.view import RunView


def status_of(
    run_id: str, view: RunView, started_at: float, consoles: int, exit_code: int | None
) -> Status:
    stats = view.stats
    running = [s for s in view.stages.values() if s.status == "running"]
    stage = running[-1] if running else None
    return Status(
        run_id=run_id,
        state=view.state,
        reason=view.reason,
        seq=view.seq,
        ts=time.time(),
        pid=os.getpid(),
        started_at=started_at,
        stage=stage.name if stage else "",
        stage_done=stage.done if stage else 0,
        stage_total=stage.total if stage else 0,
        prompts=view.started.prompts if view.started else 0,
        done=stats.done if stats else 0,
        ok=stats.ok if stats else 0,
        rejected=stats.rejected if stats else 0,
        failed=stats.failed if stats else 0,
        in_flight=stats.in_flight if stats and exit_code is None else 0,
        spent_usd=stats.spent_usd if stats else 0.0,
        reserved_usd=stats.reserved_usd if stats else 0.0,
        uncertain_usd=stats.uncertain_usd if stats else 0.0,
        budget_usd=stats.budget_usd
        if stats
        else (view.started.budget_usd if view.started else 0.0),
        exposure_usd=stats.exposure_usd if stats else None,
        eta_s=stats.eta_s if stats else None,
        tokens_per_s=stats.tokens_per_s if stats else 0.0,
        acceptance_length=view.evaluated.acceptance_length if view.evaluated else None,
        exit_code=exit_code,
        consoles=consoles,
    )
