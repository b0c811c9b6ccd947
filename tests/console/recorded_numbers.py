"""The moving numbers of the recorded run: pure functions of the tick, and the audit's last word."""

import math
import random

import msgspec

from core import events as ev

BASE_TS = 1_764_417_600.0  # 2025-11-29 12:00:00 UTC
RUN_ID = "20251129-120000-ab12"
HOSTILE = (
    "\x1b]0;owned\x07\x1b[2J[red]not markup[/red] [/nonsense] \u202egnp.exe\u202c "
    "\u200bzero\u00ad \x9b31m 日本語 👍🏽"
)
PROMPTS = 204


def host(tick: int, rng: random.Random) -> ev.Host:
    return ev.Host(
        cpu_pct=62 + 25 * math.sin(tick / 7) + rng.uniform(-6, 6),
        cpus=2,
        ram_used_bytes=3_120_000_000,
        ram_total_bytes=8_200_000_000,
        disk_free_bytes=41_200_000_000,
        disk_total_bytes=105_000_000_000,
        net_rx_bytes_s=184_000 + 40_000 * math.sin(tick / 5),
        net_tx_bytes_s=62_000.0,
    )


def stats(tick: int, done: int, rng: random.Random) -> ev.Stats:
    rejected = done // 23
    failed = 1 if done > 60 else 0
    ok = done - rejected - failed
    ramp = min(1.0, tick / 20)
    in_flight = int(48 * ramp) if done < PROMPTS else 0
    per_min = 150 * ramp + 18 * math.sin(tick / 6) + rng.uniform(-6, 6)
    spent = done * 0.00213
    return ev.Stats(
        in_flight=in_flight,
        limit=64,
        queued=max(0, PROMPTS - done - in_flight),
        prompts=PROMPTS,
        done=done,
        ok=ok,
        rejected=rejected,
        failed=failed,
        retries=3 + tick // 25,
        sent=done + in_flight + 3,
        sent_per_min=per_min * 1.04,
        done_per_min=max(0.0, per_min),
        tokens_per_s=max(0.0, per_min * 21.3),
        prompt_tokens=done * 188,
        completion_tokens=done * 96,
        spent_usd=spent,
        reserved_usd=in_flight * 0.0061,
        uncertain_usd=0.0021 if done > 60 else 0.0,
        budget_usd=10.0,
        usd_per_min=max(0.0, per_min) * 0.00213,
        forecast_usd=PROMPTS * 0.00219,
        eta_s=(PROMPTS - done) / 2.4 if done < PROMPTS else None,
        loop_lag_p99_ms=3.4,
        oldest_in_flight_s=6.2 + 3 * math.sin(tick / 9),
        providers=provider_rows(done, in_flight, ramp),
        errors=_errors(tick),
        verdicts={
            "exact": done * 45 // 100,
            "consistent": done * 48 // 100,
            "hypothesis": done // 60,
            "mismatch": done // 110,
            "unverifiable": done // 100,
            "rejected": rejected,
        },
    )


def provider_rows(done: int, in_flight: int, ramp: float) -> list[ev.ProviderRow]:
    """Three upstreams behind one API and a local server; the last one misbehaves."""
    if ramp == 0:
        return []
    # name, share of the load, limit, share of the done, p50, p99, ttft, tokens/s, $/min, $ each
    table = (
        ("local", 4, 16, 45, 1.12, 2.31, 0.084, 1240, 0.0, 0.0),
        ("kestrel", 2, 24, 35, 1.94, 4.02, 0.312, 1010, 0.214, 0.00121),
        ("harrier", 6, 16, 16, 2.42, 9.8, 0.54, 610, 0.088, 0.00071),
        ("merlin", 12, 8, 4, 3.1, 18.4, 1.2, 120, 0.018, 0.00021),
    )
    extra = {
        "kestrel": {"errors": 1},
        "harrier": {"errors": 2, "status_429": 14, "backoff_s": 4.0},
        "merlin": {"errors": 6, "breaker": "open"},
    }
    return [
        msgspec.convert(
            {
                "name": name,
                "backend": "sglang" if name == "local" else "openrouter",
                "in_flight": in_flight // load,
                "limit": limit,
                "done": done * share // 100,
                "p50_s": p50,
                "p99_s": p99,
                "ttft_p50_s": ttft,
                "tokens_per_s": tokens * ramp,
                "usd_per_min": usd * ramp,
                "spent_usd": done * each,
            }
            | extra.get(name, {}),
            ev.ProviderRow,
        )
        for name, load, limit, share, p50, p99, ttft, tokens, usd, each in table
    ]


def _errors(tick: int) -> list[ev.ErrorRow]:
    if tick < 20:
        return []
    return [
        ev.ErrorRow(
            provider="harrier",
            error_class="rate_limited",
            count=14 + tick // 30,
            last_ts=BASE_TS + tick / 2,
            example='{"error":{"code":429,"message":"slow down"}}',
        ),
        ev.ErrorRow(
            provider="merlin",
            error_class="unknown_marker",
            count=4,
            last_ts=BASE_TS + 17,
            example=HOSTILE,
        ),
        ev.ErrorRow(
            provider="merlin",
            error_class="body_not_json",
            count=2,
            last_ts=BASE_TS + 15,
            example="<html><title>502 Bad Gateway</title>\n<body>nginx\x1b[31m</body></html>",
        ),
        ev.ErrorRow(
            provider="kestrel",
            error_class="tool_args_invalid",
            count=1,
            last_ts=BASE_TS + 19,
            example='{"city": "Ulm',
        ),
    ]


def outcome(n: int) -> ev.Outcome:
    kinds = (
        ("ok", "exact", None),
        ("ok", "consistent", None),
        ("rejected", "rejected", "unknown_marker"),
        ("ok", "mismatch", None),
    )
    outcome, verdict, error_class = kinds[0 if n % 7 else 2] if n % 2 else kinds[1 if n % 5 else 3]
    local = n % 2 == 1
    return ev.Outcome(
        prompt_id=f"{n:04x}aa55",
        sample_id=f"{n:04x}aa55",
        dataset=("tools", "chat", "code")[n % 3],
        arm="local" if local else "declared",
        backend="sglang" if local else "openrouter",
        provider="local" if local else ("kestrel", "harrier")[n % 4 // 2],
        outcome=outcome,
        verdict=verdict,
        error_class=error_class,
        prompt_tokens=150 + n,
        completion_tokens=64 + 3 * n,
        cost_usd=0.0 if local else 0.0031,
        latency_s=1.2 + n / 10,
        calls=n % 3,
    )


AUDIT = ev.Audit(
    rows=[
        ev.AuditRow(
            dataset="tools",
            provider="kestrel",
            arm="declared",
            samples=58,
            trigger_rate=0.914,
            reference_rate=0.922,
            p_value=0.77,
            schema_valid_rate=1.0,
            name_match_rate=0.98,
            args_match_rate=0.94,
            decision="keep",
        ),
        ev.AuditRow(
            dataset="tools",
            provider="harrier",
            arm="declared",
            samples=31,
            trigger_rate=0.61,
            reference_rate=0.922,
            p_value=0.00002,
            schema_valid_rate=0.97,
            name_match_rate=0.9,
            args_match_rate=0.81,
            decision="filter",
            reason="triggers tools far less often than the local arm",
        ),
        ev.AuditRow(
            dataset="chat",
            provider="kestrel",
            arm="declared",
            samples=40,
            trigger_rate=0.0,
            reference_rate=0.0,
            decision="keep",
        ),
    ],
    findings={"name_undeclared": 2, "args_schema": 1, "reasoning_empty": 3},
    exactness={"rate": 0.9981, "pairs": 64},
)
