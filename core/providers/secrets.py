"""Keys that a server may quote back at us: nothing that is kept or shown may hold one."""

from collections.abc import Iterable

SHORTEST = 8
"""What is shorter than any key may be a word of an answer."""
SHOWN = "[secret]"


class Secrets:
    """The keys of one backend. To be hidden before a text is cut: half a key says much of it."""

    __slots__ = ("_bytes", "_texts")

    def __init__(self, keys: Iterable[str] = ()) -> None:
        keys = [key for key in keys if len(key) >= SHORTEST]
        escaped = [key.replace("/", "\\/") for key in keys]  # as PHP writes JSON
        self._texts = list(dict.fromkeys([*keys, *escaped]))
        self._bytes = [text.encode() for text in self._texts]

    def hide(self, text: str) -> str:
        for key in self._texts:
            text = text.replace(key, SHOWN)
        return text

    def hide_raw(self, raw: bytes) -> bytes:
        for key in self._bytes:
            raw = raw.replace(key, SHOWN.encode())
        return raw


NO_SECRETS = Secrets()
