"""No fault of the embedded gateway gets wrong ids past the reconstruct stage, but for those that
neither text nor count of a reply can show: `python -m tests.faults.exactness` prints them all."""

from pathlib import Path
from typing import Any

import pytest

from core.config import load
from core.embedded.faults import ANSWERS, GENERATION, KINDS, TEXT, WIRE
from core.pipeline.setting import DEMO_CONFIG
from core.prompts import load_prompts
from core.schema import TRAINABLE
from core.store import read_samples
from tests.core.generate.rig import config_of
from tests.faults.exactness import (
    HIDDEN,
    Scenario,
    api_prompts,
    replaying,
    scenarios,
    settings,
    shown,
)
from tests.faults.scoring import corpus_tape, score

REPLIES = 36
SPLITS = 0.15


@pytest.fixture(scope="module")
def tape(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Replies as a perfect model gives them, some in another split of their text."""
    path = tmp_path_factory.mktemp("tape") / "tape.jsonl"
    return corpus_tape(path, *api_prompts(REPLIES), splits=SPLITS)


@pytest.mark.parametrize("provider", ["alder", "birch"])  # they count the stop token, and do not
@pytest.mark.parametrize("stream", [True, False])
async def test_without_faults_canonical_completions_are_admitted_with_their_ids(
    tmp_path: Path, tape: Path, provider: str, stream: bool
) -> None:
    async with replaying(tmp_path, tape) as bench:
        alone, beside = await bench.try_one(
            Scenario("none", stream=stream), REPLIES, provider=provider
        )
    for result in (alone, beside):
        assert (result.replies, result.wrong) == (REPLIES, [])
        assert result.canonical == result.canonical_right == result.verdicts["consistent"]
        assert 0 < REPLIES - result.canonical < 10
        assert result.verdicts.keys() <= {"consistent", "hypothesis", "mismatch"}


@pytest.mark.parametrize("endpoint", ["generate", "chat"])
async def test_local_ids_are_exact_whatever_their_split(
    tmp_path: Path, tape: Path, endpoint: str
) -> None:
    async with replaying(tmp_path, tape) as bench:
        scenario = Scenario("none", arm="local", endpoint=endpoint)
        result, _ = await bench.try_one(scenario, REPLIES)
    assert result.verdicts == {"exact": REPLIES}
    assert (result.right, result.wrong) == (REPLIES, [])


GROUPS = {"answers": ANSWERS, "generation": GENERATION, "text": TEXT, "wire": WIRE}
REPLYLESS = {"silent_stream", "cut_stream", "error_mid_stream", "truncated_body", "no_credit"}
"""Faults after which nothing whole arrives."""


@pytest.mark.parametrize(
    ("group", "provider"),
    [*((g, "birch") for g in GROUPS), ("text", "alder"), ("generation", "alder")],
)
async def test_wrong_ids_are_refused_where_text_or_count_show_them(
    tmp_path: Path, tape: Path, group: str, provider: str
) -> None:
    count = REPLIES // 3 if group == "answers" else REPLIES  # those sample nothing
    bad: list[tuple[str, Any]] = []
    hit: set[str] = set()
    async with replaying(tmp_path, tape) as bench:
        for scenario in scenarios(list(GROUPS[group]), sometimes=False):
            result, _ = await bench.try_one(scenario, count, provider=provider, reference=False)
            bad += [(scenario.name, w.sample) for w in shown(scenario, result)]
            if result.replies:
                hit.add(scenario.fault)
    assert bad == []
    assert hit >= GROUPS[group].keys() - REPLYLESS


async def test_a_provider_that_always_hides_it_is_told_by_the_local_reference(
    tmp_path: Path,
) -> None:
    """The listed exceptions: admitted when nothing is asked locally, refused when something is."""
    count = 60
    path = corpus_tape(tmp_path / "tape.jsonl", *api_prompts(count))
    async with replaying(tmp_path, path) as bench:
        for spec in ("trim_reasoning", "trim_reasoning=left", "reserialised_args=compact"):
            scenario = Scenario(spec.partition("=")[0], spec)
            assert scenario.fault in HIDDEN
            alone, beside = await bench.try_one(scenario, count, provider="alder")
            assert len(alone.wrong) > 10 and all(w.count_fits for w in alone.wrong)
            assert beside.wrong == []
            assert beside.right > 0 or spec == "trim_reasoning"


async def test_the_demo_s_twins_are_such_a_reference(tmp_path: Path) -> None:
    """The datasets of the demo as they are, through the provider that its settings prefer."""
    demo = load(DEMO_CONFIG)
    datasets = [
        {
            "name": d.name,
            "kind": d.kind,
            "families": d.families,
            "limit": d.limit,
            "arm": d.arm,
            "backend": d.backend,
            "twins": d.twins,
        }
        for d in demo.dataset
    ]
    options = {**settings(1, ""), "dataset": datasets, "run": {"seed": demo.run.seed}}
    prompts = load_prompts(config_of("http://127.0.0.1:1", **dict(options)))
    path = corpus_tape(tmp_path / "tape.jsonl", prompts, config_of("http://x", **dict(options)))
    async with replaying(tmp_path, path) as bench:
        options |= {"sglang": {"urls": [bench.url]}, "openrouter": {"only": ["birch"]}}
        run, config = await bench.ask("trim_reasoning", options)
        result = score(run, config, bench.truth.now(), "declared")
        plain, _ = await bench.ask("", options)
        unhurt = score(plain, config, bench.truth.now(), "declared")
    assert result.replies == unhurt.replies == 130
    assert result.wrong == unhurt.wrong == []
    assert unhurt.right == unhurt.replies
    flagged = [s for s in read_samples(run) if "provider_trims_whitespace" in s.flags]
    assert len(flagged) > 50
    assert not any(s.verdict in TRAINABLE for s in flagged)


def test_the_list_of_exceptions_names_faults() -> None:
    assert HIDDEN.keys() <= KINDS.keys()
