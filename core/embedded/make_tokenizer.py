"""Train the embedded target's tokenizer on the corpus and write it in Kimi's file format.

Promises: the same corpus gives the same bytes on every machine (counts and ties are ordered by
content); every piece is reached by merging pieces of lower rank, so tiktoken encodes exactly what
was trained. Word pattern, distances of the special tokens and file names are Kimi's. No torch.
"""

import base64
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

from tokenizers import Regex, pre_tokenizers

from core.embedded.corpus import Example, examples
from core.embedded.replies import MARKERS
from core.render.tokenizer import NAMED_OFFSETS, PATTERN
from core.render.tools_ts import declare
from core.store import write_atomic

NUM_MERGEABLE = 1_024
"""Base vocabulary, the 256 single bytes included."""
CORPUS_SEED, CORPUS_EXAMPLES = 0, 12_000
_ROLE_WORDS = ("user", "system", "assistant", "tool", "tool_declare")
_DIGITS = frozenset(b"0123456789")

Word = tuple[bytes, ...]
Pair = tuple[bytes, bytes]


def texts(example: Example) -> Iterator[str]:
    """Every text between two special tokens of the rendered example."""
    if example.tools:
        yield declare(example.tools).text
    for message in example.messages:
        prefix = f"## Return of {message['tool_call_id']}\n" if message["role"] == "tool" else ""
        yield prefix + message["content"]
    yield from (example.reasoning, example.content)
    for call in example.tool_calls:
        yield from (call.id, call.arguments)


def train_ranks(corpus: Iterable[str], size: int = NUM_MERGEABLE) -> dict[bytes, int]:
    """Byte-pair ranks of `size` pieces: 256 bytes, then the most frequent pair, again and again.

    Two digits never merge: numbers are copied and added digit by digit. A piece is whole characters
    or the beginning of one, so that CJK text is cut between characters. A pair whose bytes are a
    piece already is left alone, else two ranks would compete for one string. Ties go to the smaller
    bytes.
    """
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    counts: Counter[str] = Counter()
    for text in corpus:
        counts.update(word for word, _ in split.pre_tokenize_str(text))
    words: list[Word] = [tuple(bytes([b]) for b in word.encode()) for word in counts]
    weights = list(counts.values())
    pairs: Counter[Pair] = Counter()
    where: defaultdict[Pair, set[int]] = defaultdict(set)
    for i, word in enumerate(words):
        _count(word, i, weights[i], pairs, where)
    ranks = {bytes([b]): b for b in range(256)}
    while len(ranks) < size:
        best = max(
            (pair for pair in pairs if pairs[pair] > 0 and _may_merge(pair, ranks)),
            key=lambda pair: (pairs[pair], [-b for b in pair[0]], [-b for b in pair[1]]),
        )
        ranks[best[0] + best[1]] = len(ranks)
        for i in sorted(where.pop(best)):
            _count(words[i], i, -weights[i], pairs, where)
            words[i] = _merged(words[i], best)
            _count(words[i], i, weights[i], pairs, where)
    return ranks


def write_tokenizer(directory: Path) -> None:
    """Write `tiktoken.model` and `tokenizer_config.json`."""
    corpus = examples("train", CORPUS_SEED, limit=CORPUS_EXAMPLES)
    ranks = train_ranks([*(t for example in corpus for t in texts(example)), *_ROLE_WORDS])
    lines = [base64.b64encode(piece) + b" %d\n" % rank for piece, rank in ranks.items()]
    directory.mkdir(parents=True, exist_ok=True)
    write_atomic(directory / "tiktoken.model", b"".join(lines))
    config = json.dumps(tokenizer_config(len(ranks)), indent=2, ensure_ascii=True) + "\n"
    write_atomic(directory / "tokenizer_config.json", config.encode())


def tokenizer_config(num_base: int) -> dict[str, object]:
    """Names, ids and flags of the special tokens, at Kimi's distances from the base vocabulary."""
    return {
        "added_tokens_decoder": {
            str(num_base + offset): {
                "content": name,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": name not in MARKERS,
            }
            for name, offset in NAMED_OFFSETS.items()
        },
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_024,
        "tokenizer_class": "TikTokenTokenizer",
    }


def _count(
    word: Word, i: int, weight: int, pairs: Counter[Pair], where: defaultdict[Pair, set[int]]
) -> None:
    for pair in pairwise(word):
        pairs[pair] += weight
        where[pair].add(i)


def _may_merge(pair: Pair, ranks: dict[bytes, int]) -> bool:
    piece = pair[0] + pair[1]
    if pair[0][-1] in _DIGITS and pair[1][0] in _DIGITS:
        return False
    return piece not in ranks and _is_aligned(piece)


def _is_aligned(piece: bytes) -> bool:
    """Whole UTF-8 characters, or the first bytes of one."""
    try:
        piece.decode()
    except UnicodeDecodeError as e:
        return e.start == 0 and e.reason == "unexpected end of data"
    return True


def _merged(word: Word, pair: Pair) -> Word:
    pieces: list[bytes] = []
    for piece in word:
        if pieces and pieces[-1] == pair[0] and piece == pair[1]:
            pieces[-1] = pair[0] + pair[1]
        else:
            pieces.append(piece)
    return tuple(pieces)
