"""The tokenizer on the embedded vocabulary, chunking against a naive scan, and bad directories."""

import base64
import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.embedded import TARGET_DIR
from core.errors import TokenizerError
from core.render.tokenizer import PIECE_CHARS, RUN_CHARS, Tokenizer, chunk_cuts


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(TARGET_DIR)


def naive_cuts(text: str, piece_chars: int, run_chars: int) -> list[int]:
    """The rule told step by step, character by character."""
    cuts = []
    for start in range(0, len(text), piece_chars):
        if start:
            cuts.append(start)
        run = 0
        for i in range(start, min(start + piece_chars, len(text))):
            same = i > start and text[i].isspace() == text[i - 1].isspace()
            run = run + 1 if same else 1
            if run > run_chars:
                cuts.append(i)
                run = 1
    return cuts


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("a \u001c\u3000\u00a0\u0085字"), st.integers(1, 13))))
def test_chunking_equals_a_naive_scan(runs: list[tuple[str, int]]) -> None:
    text = "".join(c * n for c, n in runs)
    scaled = pytest.MonkeyPatch()
    scaled.setattr("core.render.tokenizer.RUN_CHARS", 5)
    scaled.setattr("core.render.tokenizer.PIECE_CHARS", 20)
    try:
        assert chunk_cuts(text) == naive_cuts(text, 20, 5)
    finally:
        scaled.undo()


def test_chunking_at_full_size() -> None:
    text = "x" * 60_000 + " " + "-" * 25_000 + " " * 25_001
    assert chunk_cuts(text) == [25_000, 50_000, 110_001]
    assert chunk_cuts("a b" * PIECE_CHARS) == [PIECE_CHARS, 2 * PIECE_CHARS]
    assert chunk_cuts("x" * RUN_CHARS) == []


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode_ordinary(text)
    assert tokenizer.decode(ids) == text
    assert b"".join(tokenizer.token_bytes(i) for i in ids) == text.encode()
    assert not any(tokenizer.is_special(i) for i in ids)


def test_specials_are_text_unless_asked_for(tokenizer: Tokenizer) -> None:
    text = "a<|im_end|>b</think>"
    ordinary, special = tokenizer.encode_ordinary(text), tokenizer.encode_special(text)
    assert not any(map(tokenizer.is_special, ordinary))
    assert [i for i in special if tokenizer.is_special(i)] == [
        tokenizer.specials["<|im_end|>"],
        tokenizer.specials["</think>"],
    ]
    assert tokenizer.decode(ordinary) == tokenizer.decode(special) == text
    assert tokenizer.specials["<|im_end|>"] == tokenizer.num_base + 2


def test_split_utf8_survives_as_bytes(tokenizer: Tokenizer) -> None:
    first = tokenizer.encode_ordinary("\ue123")
    assert len(first) > 1
    assert tokenizer.decode(first[:1]).endswith("\ufffd")
    halves = [tokenizer.decode_bytes(first[:1]), tokenizer.decode_bytes(first[1:])]
    assert b"".join(halves).decode() == "\ue123"


def test_a_lone_surrogate_encodes_as_the_replacement_character(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode_ordinary("\ud83c") == tokenizer.encode_ordinary("\ufffd")


def test_megabytes_of_one_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_ordinary("-" * 3_000_000)
    assert tokenizer.decode(ids) == "-" * 3_000_000


@pytest.mark.parametrize("bad", [-1, 10**6, 2**40])
def test_ids_outside_the_vocabulary(tokenizer: Tokenizer, bad: int) -> None:
    with pytest.raises(TokenizerError, match="not in a vocabulary") as e:
        tokenizer.decode([0, bad])
    assert e.value.kind == "token_id_unknown"


def broken(tmp_path: Path, name: str, data: bytes | None) -> Path:
    for file in ("tiktoken.model", "tokenizer_config.json"):
        shutil.copy(TARGET_DIR / file, tmp_path)
    (tmp_path / name).unlink()
    if data is not None:
        (tmp_path / name).write_bytes(data)
    return tmp_path


RANK_LINES = b"".join(base64.b64encode(bytes([b])) + b" %d\n" % b for b in range(256))


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("tiktoken.model", None, "cannot be read"),
        ("tiktoken.model", b"", "ranks are not"),
        ("tiktoken.model", b"\xff\xfe binary", "not a `base64 rank` line"),
        ("tiktoken.model", b"QQ== x\n", "not a `base64 rank` line"),
        ("tiktoken.model", RANK_LINES.replace(b" 7\n", b" 300\n"), "ranks are not"),
        ("tiktoken.model", RANK_LINES, "different models"),
        ("tokenizer_config.json", None, "cannot be read"),
        ("tokenizer_config.json", b"{", "added_tokens_decoder"),
        ("tokenizer_config.json", b"[]", "added_tokens_decoder"),
        ("tokenizer_config.json", b"[" * 100_000, "added_tokens_decoder"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {}}', "should have id"),
    ],
)
def test_bad_directories_are_one_line(
    tmp_path: Path, name: str, data: bytes | None, message: str
) -> None:
    with pytest.raises(TokenizerError, match=message) as e:
        Tokenizer.load(broken(tmp_path, name, data))
    assert "\n" not in str(e.value)
    assert str(tmp_path) in str(e.value)


def test_no_directory() -> None:
    with pytest.raises(TokenizerError, match="no such directory"):
        Tokenizer.load(Path("/nonexistent/tokenizer"))


def test_a_special_at_another_id_names_both(tmp_path: Path) -> None:
    config = json.loads((TARGET_DIR / "tokenizer_config.json").read_text())
    added = config["added_tokens_decoder"]
    key = next(k for k, row in added.items() if row["content"] == "</think>")
    added[str(int(key) + 1)] = added.pop(key)
    path = broken(tmp_path, "tokenizer_config.json", json.dumps(config).encode())
    with pytest.raises(TokenizerError) as e:
        Tokenizer.load(path)
    assert e.value.kind == "tokenizer_mismatch"
    assert f"'</think>' should have id {key} but has {int(key) + 1}" in str(e.value)


def test_hashes_name_the_bytes(tokenizer: Tokenizer) -> None:
    import hashlib

    data = (TARGET_DIR / "tiktoken.model").read_bytes()
    assert tokenizer.sha256 == hashlib.sha256(data).hexdigest()
    assert set(tokenizer.hashes) == {"tiktoken.model", "tokenizer_config.json"}
