"""Partial screen updates that send the changed cells and nothing left of them.

Textual 8.2.8 sends each changed piece of a line from the left edge of its widget; on a board whose
numbers stand at the right of their panes that is most of the bytes. Tied to its compositor, like
the driver; the pty tests measure it.
"""

from rich.console import Console
from rich.control import Control
from textual._compositor import ChopsUpdate


class ExactUpdate(ChopsUpdate):
    """The same update, each piece cut at both ends."""

    @classmethod
    def of(cls, update: ChopsUpdate) -> "ExactUpdate":
        return cls(update.chops, update.spans, update.chop_ends)

    def render_segments(self, console: Console) -> str:
        """Terminal sequences: one cursor move and the cells of each changed piece."""
        out: list[str] = []
        for y, x1, x2 in self.spans:
            for end, (x, strip) in zip(self.chop_ends[y], self.chops[y].items(), strict=False):
                if strip is None or x >= x2 or end <= x1:
                    continue
                start, stop = max(x, x1), min(end, x2)
                piece = strip if (start, stop) == (x, end) else strip.crop(start - x, stop - x)
                out.append(Control.move_to(start, y).segment.text)
                out.append(piece.render(console))
        return "".join(out)
