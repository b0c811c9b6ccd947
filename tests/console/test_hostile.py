"""Samples that attack the screen: in the list, in every view of one, and as lines, nothing of them
is obeyed, parsed or waited for.
"""

import msgspec
import pytest

from console import probe
from console.__main__ import main
from console.screens.probe import ProbeScreen
from console.screens.sample import SampleScreen
from console.widgets import tokens as tk
from console.widgets.evidence import MOST, evidence
from console.widgets.line import plain
from core.render.tokenizer import Tokenizer
from core.schema import Sample, ToolCall
from core.store import RunDir, read_samples, write_samples
from tests.console.recorded_run import write_run
from tests.console.still import StillApp
from tests.console.test_app import opened, settle, until
from tests.console.test_probe import TARGET
from tests.console.test_sanitize import obeyed

ATTACKS = {
    "escapes": "\x1b[2J\x1b]0;owned\x07\x9b31m\x1bP+q\x1b\\",
    "bidi": "\u202eevil\u2066\u2069\u200f\u061c",
    "markup": "[red]x[/] [/INST] [@click=app.quit]y[/] :boom: [link=file:///]z",
    "nul": "a\x00b\x00\r\n\t\x7f",
    "invisible": "\u200b\u200d\ufeff\U000e0041\u00ad\u2028",
    "megabytes": "A" * 2_000_000 + "\x1b[31m",
    "surrogates": "\ud83d x \udc00",
}


def attacked(sample: Sample, text: str, tokenizer: Tokenizer) -> Sample:
    """The text in every field that a model or an API writes, in the ids, and ids that are none."""
    ids = tokenizer.encode_ordinary(text[:20_000])
    return msgspec.structs.replace(
        sample,
        provider=text,
        dataset=text,
        error_class=text,
        hypothesis=text,
        flags=[text, text],
        finish_reason=text,
        calls=[ToolCall(id=text, name=text, arguments=text)],
        token_ids=[*sample.token_ids[: sample.prompt_len], *ids, 10**9 % 2**31, 160_000],
        dropped=text,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A local sample, and for each attack one that is compared with it."""
    tokenizer = Tokenizer.load(TARGET)
    made = write_run(tmp_path_factory.mktemp("runs"), "done", tokenizer)
    local, declared = list(read_samples(made))[:2]
    samples = [
        msgspec.structs.replace(attacked(declared, text, tokenizer), sample_id=name, prompt_id=name)
        for name, text in ATTACKS.items()
    ]
    write_samples(made, [local, *samples])
    return made


async def test_the_screen_obeys_none_of_it(run: RunDir) -> None:
    app = StillApp("done", run)
    async with opened(app, (120, 36)) as pilot:
        await pilot.press("p")
        listed = app.screen
        assert isinstance(listed, ProbeScreen)
        await until(pilot, lambda: len(listed.found) > len(ATTACKS), "the list was read")
        await settle(app, pilot)
        assert obeyed(app.shown().replace("\n", "")) == []
        for name in ATTACKS:
            await pilot.press("down", "enter")
            sample = app.screen
            assert isinstance(sample, SampleScreen)
            await until(pilot, lambda shown=sample: shown.opened is not None, "it was read")
            seen = ""
            for keys in ("", "fb", "t", "wi", "t", "b"):
                await pilot.press(*keys)
                app.paint()
                await pilot.pause()
                seen += app.shown()
            assert obeyed(seen.replace("\n", "")) == []
            assert name in seen and "not trained on" in seen
            await pilot.press("escape")
            assert app.screen is listed


@pytest.mark.parametrize("name", ["", *ATTACKS])
def test_the_lines_obey_none_of_it(
    run: RunDir, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EYAS_RUNS", str(run.path.parent))
    assert main(["probe", "2025", *([name] if name else [])]) == 0
    out = capsys.readouterr().out
    assert obeyed(out.replace("\n", "")) == []
    assert "mismatch" in out and name in out
    assert max(map(len, out.split("\n"))) < 10 * MOST


@pytest.mark.parametrize("name", ATTACKS)
def test_of_a_long_text_only_the_beginning_is_looked_at(run: RunDir, name: str) -> None:
    lines = evidence(probe.open_sample(run, probe.find_row(run, name)), 100_000)
    assert max(len(plain(line).rstrip()) for line in lines) < 40 * MOST


def test_a_token_of_megabytes_is_shown_by_its_beginning() -> None:
    token = tk.Token(5, "text", b"x" * 5_000_000)
    assert tk.shown(token) == "x" * tk.MAX_BYTES + "…"
    assert tk.shown(token._replace(kind="special")) == "x" * tk.MAX_BYTES + "…"
    assert len(tk.shown(token, tk.Options(bytes=True))) == 3 * tk.MAX_BYTES
