"""Server-sent events over bytes, incrementally (WHATWG HTML, section 9.2), for streams of JSON.

Promises: the same payloads whatever the chunking; nothing is decoded. Comments are counted apart,
so that keep-alives do not look like progress (case C44). Field names other than `data` are ignored:
no backend uses them."""

DONE = b"[DONE]"


class SseParser:
    """Feed chunks as they arrive; get the payloads of the events that they complete."""

    __slots__ = ("_held_cr", "_pieces", "comments")

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        """Of the event that has not ended: joined when it has, once, however long it is."""
        self._held_cr = False
        self.comments = 0

    @property
    def tail(self) -> bytes:
        """Bytes of an event that has not ended. Not an event: a stream that stops here was cut."""
        return b"".join(self._pieces)

    def feed(self, chunk: bytes) -> list[bytes]:
        if self._held_cr or b"\r" in chunk:
            chunk = self._unix(chunk)
        if not chunk:
            return []
        end = chunk.rfind(b"\n\n")
        if self._pieces:
            if end < 0 and not (chunk[:1] == b"\n" and self._pieces[-1][-1:] == b"\n"):
                self._pieces.append(chunk)
                return []
            chunk = self.tail + chunk
            end = chunk.rfind(b"\n\n")
        elif end < 0:
            self._pieces = [chunk]
            return []
        self._pieces = [chunk[end + 2 :]] if len(chunk) > end + 2 else []
        payloads = []
        for block in chunk[:end].split(b"\n\n"):
            if block.startswith(b"data: ") and b"\n" not in block:
                payloads.append(block[6:])
            elif (payload := self._block(block)) is not None:
                payloads.append(payload)
        return payloads

    def _unix(self, chunk: bytes) -> bytes:
        """CRLF and CR are line ends too. A CR at a chunk's end waits: the next byte may be its
        LF."""
        if self._held_cr:
            chunk = b"\r" + chunk
        self._held_cr = chunk.endswith(b"\r")
        if self._held_cr:
            chunk = chunk[:-1]
        return chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")

    def _block(self, block: bytes) -> bytes | None:
        lines = []
        for line in block.split(b"\n"):
            if line.startswith(b":"):
                self.comments += 1
            elif line.startswith(b"data:"):
                lines.append(line[6:] if line.startswith(b"data: ") else line[5:])
            elif line == b"data":
                lines.append(b"")
        return b"\n".join(lines) if lines else None
