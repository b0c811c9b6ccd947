"""Server-sent events over bytes, incrementally (WHATWG HTML, section 9.2), for streams of JSON.

Promises: the same payloads whatever the chunking; nothing is decoded. Comments are counted apart,
so that keep-alives do not look like progress (case C44). Field names other than `data` are ignored:
no backend uses them."""

DONE = b"[DONE]"


class SseParser:
    """Feed chunks as they arrive; get the payloads of the events that they complete."""

    __slots__ = ("_held_cr", "_tail", "comments")

    def __init__(self) -> None:
        self._tail = b""
        self._held_cr = False
        self.comments = 0

    @property
    def tail(self) -> bytes:
        """Bytes of an event that has not ended. Not an event: a stream that stops here was cut."""
        return self._tail

    def feed(self, chunk: bytes) -> list[bytes]:
        if self._held_cr or b"\r" in chunk:
            chunk = self._unix(chunk)
        data = self._tail + chunk if self._tail else chunk
        end = data.rfind(b"\n\n")
        if end < 0:
            self._tail = data
            return []
        self._tail = data[end + 2 :]
        payloads = []
        for block in data[:end].split(b"\n\n"):
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
