"""Real servers, each started here; skipped without its environment. The modules beside this one
print the same as tables."""

from pathlib import Path

import pytest

from core.audit.record import load_audit
from core.embedded import TARGET_DIR
from core.store import read_samples
from tests.kimi_files import kimi_renderer, needs_kimi
from tests.servers.engines import ENGINES, SMOLLM2, replies, serve_and_run, sound
from tests.servers.engines import QUESTIONS as ENGINE_QUESTIONS
from tests.servers.kimi_model import embedded_target, random_kimi
from tests.servers.serving import free_port, needs, needs_kimi_code, served, sglang
from tests.servers.sglang_kimi import ASKED, CAUSES, PARSERS, QUESTIONS, compared, truth_runs

pytestmark = [pytest.mark.servers, pytest.mark.slow, pytest.mark.timeout(1_800)]


@needs("sglang")
@needs_kimi
@needs_kimi_code
def test_prompt_ids_are_sglangs(tmp_path: Path) -> None:
    model, port = random_kimi(tmp_path / "model"), free_port()
    with served(sglang(model, port, *PARSERS), port, tmp_path / "server.log") as url:
        found = list(compared(url, kimi_renderer()))
    assert [c.case.name for c in found if c.ours.ids != c.bound] == []
    assert [c.case.name for c in found if c.cause is None] == []
    assert sum(c.cause == "" for c in found) == ASKED
    assert {c.cause for c in found} == {"", *CAUSES}


@needs("sglang")
@needs_kimi_code
@pytest.mark.skipif(
    not (TARGET_DIR / "model.safetensors").exists(), reason="the built-in target has no weights"
)
def test_ground_truth_against_sglang(tmp_path: Path) -> None:
    """Each reply's ids are exact; how many of them a rebuild from text finds is a measurement."""
    model, port = embedded_target(tmp_path / "model"), free_port()
    with served(sglang(model, port, *PARSERS), port, tmp_path / "server.log") as url:
        runs = truth_runs(url, tmp_path)
    for endpoint, run in runs.items():
        samples = list(read_samples(run))
        assert len(samples) == QUESTIONS
        exact = [s for s in samples if s.verdict == "exact"]
        assert len(exact) > QUESTIONS / 2
        assert not {s.error_class for s in samples} & {"prompt_ids_differ", "ids_text_mismatch"}
        found = load_audit(run).exactness
        assert found.samples == len(exact)
        assert found.with_text == (len(exact) if endpoint == "chat" else 0)
        assert found.low < found.exact / found.samples <= found.high


@pytest.mark.parametrize(
    "engine",
    [pytest.param(engine, marks=needs(where)) for engine, where in ENGINES.items()],
)
@pytest.mark.skipif(
    not (SMOLLM2 / "config.json").exists(),
    reason=f"no model at {SMOLLM2} (EYAS_SMOLLM2 names another); see servers.md in ../shared/tools",
)
def test_every_sample_of_a_real_engine_is_exact(engine: str, tmp_path: Path) -> None:
    for result in serve_and_run(engine, tmp_path):
        assert len(result.samples) == ENGINE_QUESTIONS
        assert {line.reply_kind for line in replies(result)} == {result.way.kind}
        assert [s.error_class for s in result.samples if not sound(s)] == []
        assert sum(s.verdict == "exact" for s in result.samples) >= ENGINE_QUESTIONS - 5
