"""What every full screen shares: a top bar, a footer, and `paint`, called by the app at its own
pace.
"""

from typing import TYPE_CHECKING

from textual.app import ComposeResult
from textual.screen import Screen
from textual.widget import Widget

from console import actions
from console.session import Session
from console.widgets import bars
from console.widgets.line import fit, line
from console.widgets.lines import Lines

if TYPE_CHECKING:
    from console.app import ConsoleApp


class BaseScreen(Screen[None], inherit_bindings=True):
    """Subclasses yield their middle in `body` and fill it in `paint_body`."""

    footer_names: tuple[str, ...] = actions.LIST_FOOTER
    extra_keys: tuple[tuple[str, str], ...] = ()
    more_keys: tuple[tuple[str, str], ...] = ()
    """Keys that a narrow footer leaves out first."""
    help_keys: tuple[tuple[str, str], ...] = ()
    """The screen's own part of the help; empty: `extra_keys`."""
    heading = ""

    def __init__(self, session: Session | None) -> None:
        super().__init__()
        self.session = session
        self._composed = False

    @property
    def console(self) -> "ConsoleApp":
        from console.app import ConsoleApp

        assert isinstance(self.app, ConsoleApp)
        return self.app

    def compose(self) -> ComposeResult:
        yield Lines("top", focusable=False).add_class("edge")
        yield from self.body()
        yield Lines("footer", focusable=False).add_class("edge")

    def body(self) -> ComposeResult:
        yield Widget()

    def on_mount(self) -> None:
        self._composed = True
        self.set_class(self.console.ascii_only, "-ascii")
        self.call_after_refresh(self.paint)

    def on_resize(self) -> None:
        self.call_after_refresh(self.paint)

    def on_screen_resume(self) -> None:
        self.call_after_refresh(self.paint)

    def paint(self) -> None:
        """Bring what is on the screen up to the state; cheap when nothing changed."""
        if not (
            self._composed and self.is_attached and self.query("#top") and self.query("#footer")
        ):
            return  # before the first layout, or while the screen is taken down
        self.paint_edges()
        if not (self.session and self.session.state.frozen):
            self.paint_body()

    def paint_edges(self) -> None:
        top, foot = self.query_one("#top", Lines), self.query_one("#footer", Lines)
        width = self.size.width
        read_only = False
        if self.session is not None:
            state = self.session.state
            read_only = state.read_only
            top.set_lines([bars.top_bar(state, width, self.session.clock(), self.session.wall())])
        else:
            top.set_lines([fit(line((f" eyas · {self.heading}", "bar-bold")), width, "bar")])
        usual = actions.footer_keys(self.footer_names, read_only)
        keys = [*self.extra_keys, *usual, *self.more_keys]
        foot.set_lines([bars.footer(keys, width, self.note(width))])

    def note(self, width: int) -> str:
        """Right end of the footer."""
        return self.heading if width >= 100 else ""

    def paint_body(self) -> None:
        """Fill the middle."""
