"""Training curves on the whole screen. The plot library is loaded when this screen is first opened,
never before.
"""

import itertools
import math
import time
from typing import TYPE_CHECKING, Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from console.screens.base import BaseScreen
from console.widgets.line import fit, line
from console.widgets.lines import Lines

if TYPE_CHECKING:
    from textual_plot import PlotWidget

REPAINT_S = 1.0
LINES = ("#56B4E9", "#E69F00", "#CC79A7", "#F0E442", "#E8743B", "#9AA5B1", "#0072B2")


class ChartScreen(BaseScreen):
    CSS_PATH = "chart.tcss"
    heading = "training"
    footer_names = ("halt", "back", "help", "detach")
    extra_keys = (("y", "log scale"), ("a", "accuracy/loss"))
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "toggle_log", show=False),
        Binding("a", "toggle_series", show=False),
    ]

    def __init__(self, session: Any) -> None:
        super().__init__(session)
        self.log_scale, self.accuracy = True, False
        self._drawn: tuple[Any, ...] = ()
        self._drawn_at = 0.0

    def body(self) -> ComposeResult:
        from textual_plot import PlotWidget

        yield Lines("caption", focusable=False)
        yield PlotWidget(id="plot")

    def action_toggle_log(self) -> None:
        self.log_scale = not self.log_scale
        self._drawn_at = 0.0
        self.paint()

    def action_toggle_series(self) -> None:
        self.accuracy = not self.accuracy
        self._drawn_at = 0.0
        self.paint()

    def paint_body(self) -> None:
        assert self.session is not None
        view = self.session.state.view
        caption = self.query_one("#caption", Lines)
        train = view.train
        if train is None:
            caption.set_lines([fit(line((" no training step yet", "dim")), self.size.width)])
            return
        what = (
            "accuracy of each draft step"
            if self.accuracy
            else f"loss{' (log10)' if self.log_scale else ''}"
        )
        caption.set_lines(
            [
                fit(
                    line(
                        (f" {what}", "bold"),
                        (f"   step {train.step:,} · loss {train.loss:.4f}", "dim"),
                    ),
                    self.size.width,
                )
            ]
        )
        key = (train.step, self.log_scale, self.accuracy, self.size)
        if key == self._drawn or time.monotonic() - self._drawn_at < REPAINT_S:
            return
        self._drawn, self._drawn_at = key, time.monotonic()
        self._draw(self.query_one("#plot"))

    def _draw(self, plot: "PlotWidget | Any") -> None:
        from textual_plot import HiResMode

        assert self.session is not None
        state = self.session.state
        mode = (
            None if self.console.ascii_only else HiResMode.QUADRANT
        )  # fonts that lack Braille are common
        plot.clear()
        if self.accuracy:
            for ring, style in zip(state.series.accuracy, itertools.cycle(LINES), strict=False):
                if ring:
                    plot.plot(list(range(len(ring))), list(ring), style, mode)
            return
        points = state.view.train_history
        points = points[:: max(1, len(points) // max(1, 2 * self.size.width))]
        ys = [math.log10(max(loss, 1e-9)) if self.log_scale else loss for _, loss in points]
        plot.plot([float(x) for x, _ in points], ys, LINES[0], mode)
