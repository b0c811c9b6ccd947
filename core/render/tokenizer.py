"""One tokenizer in Kimi's file format: `tiktoken.model` plus the specials of its config.

Promises: ids equal the checkpoint's own, long runs included; every named special token sits at its
known distance from the base vocabulary, or loading fails. Reads data, never executes code of a
checkpoint. Knows nothing about chat templates.
"""

import base64
import binascii
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Collection, Sequence, Set
from pathlib import Path
from typing import Any, Protocol

import tiktoken

from core.errors import TokenizerError

NUM_RESERVED = 256
# Distance of each named special token from the end of the base vocabulary (163,584 for Kimi).
# Source: tokenizer_config.json of MoonshotAI/Kimi-Vendor-Verifier@3dad65a7.
NAMED_OFFSETS = {
    "[BOS]": 0,
    "[EOS]": 1,
    "<|im_end|>": 2,
    "<|im_user|>": 3,
    "<|im_assistant|>": 4,
    "<|start_header_id|>": 6,
    "<|end_header_id|>": 7,
    "[EOT]": 9,
    "<|im_system|>": 10,
    "<|tool_calls_section_begin|>": 11,
    "<|tool_calls_section_end|>": 12,
    "<|tool_call_begin|>": 13,
    "<|tool_call_argument_begin|>": 14,
    "<|tool_call_end|>": 15,
    "<|im_middle|>": 17,
    "<|media_begin|>": 18,
    "<|media_content|>": 19,
    "<|media_end|>": 20,
    "<|media_pad|>": 21,
    "<think>": 22,
    "</think>": 23,
    "[UNK]": 254,
    "[PAD]": 255,
}
# The checkpoint's word pattern, joined with `|` (same source).
PATTERN = "|".join(
    [
        r"""[\p{Han}]+""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""\p{N}{1,3}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    ]
)
PIECE_CHARS = 400_000
RUN_CHARS = 25_000
# `\s` of Python's `re` is str.isspace(), which is the class that the checkpoint's chunking uses.
_SPACES = re.compile(r"\s+")
_NON_SPACES = re.compile(r"\S+")


class TokenizerLike(Protocol):
    """What renderers and rebuilding need of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def specials(self) -> dict[str, int]: ...
    @property
    def sha256(self) -> str: ...
    @property
    def hashes(self) -> dict[str, str]:
        """sha256 of each file that was read, by name."""
        ...

    def encode_ordinary(self, text: str) -> list[int]: ...
    def encode_special(self, text: str) -> list[int]: ...
    def decode_bytes(self, ids: Sequence[int]) -> bytes: ...
    def decode(self, ids: Sequence[int]) -> str: ...
    def token_bytes(self, token_id: int) -> bytes: ...
    def is_special(self, token_id: int) -> bool: ...
    @property
    def skippable(self) -> Set[int]:
        """Ids that a server's `skip_special_tokens` takes out of its text."""
        ...


def chunk_cuts(text: str) -> list[int]:
    """Positions where the checkpoint cuts a text before BPE, ascending, without 0 and the end.

    Pieces of 400,000 characters; inside each, a cut wherever a run of one class (space or not) has
    reached 25,000 characters and goes on. Linear: a run that long covers a multiple of 25,000, so
    only those are probed.
    """
    cuts: list[int] = []
    if len(text) <= RUN_CHARS:
        return cuts
    for start in range(0, len(text), PIECE_CHARS):
        if start:
            cuts.append(start)
        cuts += _run_cuts(text, start, min(start + PIECE_CHARS, len(text)))
    return cuts


def _run_cuts(text: str, start: int, end: int) -> list[int]:
    cuts: list[int] = []
    done = start
    for probe in range(start, end, RUN_CHARS):
        if probe < done:
            continue
        is_space = text[probe].isspace()
        match = (_SPACES if is_space else _NON_SPACES).match(text, probe, end)
        assert match is not None
        done = match.end()
        first = probe
        while first > start and text[first - 1].isspace() == is_space:
            first -= 1
        cuts += range(first + RUN_CHARS, done, RUN_CHARS)
    return cuts


class Tokenizer:
    """Base vocabulary by rank, then 256 reserved ids, some of them named. Threads may share one."""

    def __init__(
        self, ranks: dict[bytes, int], specials: dict[str, int], hashes: dict[str, str]
    ) -> None:
        self.num_base = len(ranks)
        self.vocab_size = self.num_base + NUM_RESERVED
        self.specials = specials
        self.hashes = hashes
        """sha256 of each file that was read."""
        self.sha256 = hashes.get("tiktoken.model", "")
        self.skippable: Set[int] = frozenset()
        self._encoding = tiktoken.Encoding(
            "eyas", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=specials
        )

    @classmethod
    def load(cls, directory: Path, required: Collection[str] = tuple(NAMED_OFFSETS)) -> "Tokenizer":
        """Read and check a directory; raises TokenizerError in one line.

        `required`: named specials that must be there. One at another id is refused in any case.
        """
        if not directory.is_dir():
            raise TokenizerError(
                f"{directory}: no such directory; name a folder with tiktoken.model and"
                " tokenizer_config.json"
            )
        model, model_hash = _read(directory / "tiktoken.model")
        config, config_hash = _read(directory / "tokenizer_config.json")
        ranks = _parse_ranks(model, directory / "tiktoken.model")
        added = _parse_added(config, directory / "tokenizer_config.json")
        specials = _parse_specials(added, directory / "tokenizer_config.json", len(ranks))
        _check_named(specials, len(ranks), required, directory)
        hashes = {"tiktoken.model": model_hash, "tokenizer_config.json": config_hash}
        tokenizer = cls(ranks, specials, hashes)
        tokenizer.skippable = frozenset(i for i, row in added.items() if row.get("special") is True)
        tokenizer._check_probes(required, directory)
        return tokenizer

    def encode_ordinary(self, text: str) -> list[int]:
        """Text as text: nothing becomes a special id; a lone surrogate becomes U+FFFD's ids."""
        if len(text) <= RUN_CHARS:
            return self._encoding.encode_ordinary(text)
        return self._encode_chunks(text, self._encoding.encode_ordinary)

    def encode_special(self, text: str) -> list[int]:
        """The checkpoint's default: text that spells a special token becomes its id."""
        if len(text) <= RUN_CHARS:
            return self._encode_all(text)
        return self._encode_chunks(text, self._encode_all)

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        try:
            return self._encoding.decode_bytes(ids)
        except (KeyError, OverflowError, TypeError) as e:
            raise TokenizerError(
                f"token id {e}: not in a vocabulary of {self.vocab_size}", kind="token_id_unknown"
            ) from e

    def decode(self, ids: Sequence[int]) -> str:
        """A character that the ends cut becomes U+FFFD; `decode_bytes` keeps its bytes."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return self.decode_bytes([token_id])

    def is_special(self, token_id: int) -> bool:
        return self.num_base <= token_id < self.vocab_size

    def _encode_all(self, text: str) -> list[int]:
        return self._encoding.encode(text, allowed_special="all")

    def _encode_chunks(self, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        ids: list[int] = []
        bounds = [0, *chunk_cuts(text), len(text)]
        last, last_ids = "", list[int]()
        for start, end in itertools.pairwise(bounds):
            chunk = text[start:end]
            # Megabytes of one character give equal chunks, and BPE of one costs up to a second.
            if chunk != last:
                last, last_ids = chunk, encode(chunk)
            ids += last_ids
        return ids

    def _check_probes(self, required: Collection[str], directory: Path) -> None:
        """Every special must encode to its id and decode back, and not merge with text."""
        for name, token_id in self.specials.items():
            got = self._encode_all(name)
            if got != [token_id] or self.token_bytes(token_id) != name.encode():
                raise _mismatch(directory, name, token_id, got)
        if "<think>" in required:
            opened, closed = self.specials["<think>"], self.specials["</think>"]
            expected = [opened, *self.encode_ordinary("plan"), closed]
            got = self._encode_all("<think>plan</think>")
            if got != expected:
                raise _mismatch(directory, "<think>plan</think>", expected, got)


def _read(path: Path) -> tuple[bytes, str]:
    try:
        data = path.read_bytes()
    except OSError as e:
        raise TokenizerError(
            f"{path}: cannot be read ({e.strerror}); a tokenizer directory holds tiktoken.model and"
            " tokenizer_config.json"
        ) from e
    return data, hashlib.sha256(data).hexdigest()


def _parse_ranks(data: bytes, path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line:
            continue
        try:
            piece, rank = line.split()
            ranks[base64.b64decode(piece, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as e:
            raise TokenizerError(
                f"{path}:{number}: not a `base64 rank` line; use an unchanged tiktoken.model"
            ) from e
    if sorted(ranks.values()) != list(range(len(ranks))) or len(ranks) < 256:
        raise TokenizerError(
            f"{path}: ranks are not 0..{len(ranks) - 1} without a gap;"
            " use an unchanged tiktoken.model"
        )
    for byte in range(256):
        if bytes([byte]) not in ranks:
            raise TokenizerError(f"{path}: byte 0x{byte:02x} has no rank; use another file")
    return ranks


def _parse_added(data: bytes, path: Path) -> dict[int, dict[str, Any]]:
    try:
        config: Any = json.loads(data)
        return {int(key): dict(row) for key, row in config["added_tokens_decoder"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise TokenizerError(
            f"{path}: no readable added_tokens_decoder ({type(e).__name__}: {e});"
            " use the checkpoint's file"
        ) from e


def _parse_specials(added: dict[int, dict[str, Any]], path: Path, num_base: int) -> dict[str, int]:
    """All 256 reserved ids; an unnamed one is `<|reserved_token_ID|>` and encodable too."""
    named = {token_id: row.get("content") for token_id, row in added.items()}
    specials: dict[str, int] = {}
    for token_id, name in named.items():
        if not num_base <= token_id < num_base + NUM_RESERVED:
            raise TokenizerError(
                f"{path}: special token {name!r} has id {token_id}, outside"
                f" {num_base}..{num_base + NUM_RESERVED - 1}; the files belong to different models",
                kind="tokenizer_mismatch",
            )
        if not isinstance(name, str) or not name or name in specials:
            raise TokenizerError(f"{path}: special token {token_id} has no name of its own")
        specials[name] = token_id
    for token_id in range(num_base, num_base + NUM_RESERVED):
        if token_id not in named:
            specials[f"<|reserved_token_{token_id}|>"] = token_id
    return specials


def _check_named(
    specials: dict[str, int], num_base: int, required: Collection[str], directory: Path
) -> None:
    for name, offset in NAMED_OFFSETS.items():
        found = specials.get(name)
        if found != num_base + offset and (found is not None or name in required):
            raise _mismatch(directory, name, num_base + offset, "none" if found is None else found)


def _mismatch(directory: Path, name: str, expected: object, found: object) -> TokenizerError:
    return TokenizerError(
        f"{directory}: special token {name!r} should have id {expected} but has {found};"
        " training data would be wrong, use the checkpoint's own tokenizer files",
        kind="tokenizer_mismatch",
    )
