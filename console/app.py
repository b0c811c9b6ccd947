"""The console application: screens, actions, and the one clock that paints.

It shows runs and steers them; it never owns one. Every key is in `actions`, every pane a pure
function of the state.
"""

import datetime
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from rich.console import RenderableType
from textual._compositor import ChopsUpdate
from textual.app import App, SystemCommand
from textual.binding import BindingType
from textual.screen import Screen

from console import actions, theme
from console.driver import ConsoleDriver
from console.sanitize import clean
from console.screens.base import BaseScreen
from console.screens.board import BoardScreen
from console.screens.lists import ErrorsScreen, ListScreen, LogScreen, RunsScreen
from console.screens.modal import HelpScreen, SummaryScreen
from console.session import Session
from console.steering import Steering
from console.update import ExactUpdate
from console.widgets.lines import Lines
from core.config import Console as ConsoleConfig
from core.events import Halt
from core.store import RunDir

if TYPE_CHECKING:
    from console.probe import Row

MAX_BACKLOG = (
    3  # writes waiting for the terminal; beyond this a paint would only make a slow link slower
)


class Probing(NamedTuple):
    """What the console opens on: the list of samples, or one of them."""

    row: "Row | None" = None
    against: str = ""


class ConsoleApp(Steering, App[int], inherit_bindings=False):
    """`run` None: the list of runs first."""

    CSS_PATH = Path(__file__).parent / "app.tcss"
    TITLE = "eyas"
    COMMAND_PALETTE_BINDING = "ctrl+p"
    BINDINGS: ClassVar[list[BindingType]] = list(actions.bindings())

    def __init__(
        self,
        run: RunDir | None = None,
        read_only: bool = False,
        config: ConsoleConfig | None = None,
        runs_folder: Path | None = None,
        replay_speed: float = 0.0,
        probing: "Probing | None" = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(driver_class=ConsoleDriver)
        self.config = config or ConsoleConfig()
        self.first_run, self.read_only, self.runs_folder = run, read_only, runs_folder
        self.replay_speed, self.probing = replay_speed, probing
        self.clock, self.wall = clock, wall
        self.session: Session | None = None
        self.left_running = ""  # the run that went on when this console was left
        self.ascii_only = self.config.ascii
        self.refresh_hz = 1.0 if self.config.low_bandwidth else self.config.refresh_hz
        self._halt_presses: list[float] = []
        self._summary_seen = 0
        self._told_below: tuple[str, Halt | None] = ("", None)
        self._paint_timer: Any = None

    def get_theme_variable_defaults(self) -> dict[str, str]:
        """Themes of others lack our two names."""
        return {"line": "#4A5560", "faint": "#7C8894"}

    # ── life ─────────────────────────────────────────────────────────────────────────────────

    def on_mount(self) -> None:
        for each in theme.THEMES:
            self.register_theme(each)
        wanted = theme.choose(self.config.theme, self.config.low_bandwidth)
        self.theme = wanted if wanted in self.available_themes else theme.DARK
        self.theme_changed_signal.subscribe(self, lambda _: self._refresh_themes())
        ConsoleDriver.on_halt = self._halt_from_input_thread
        self._set_rate(self.refresh_hz)
        if self.first_run is None:
            self.push_screen(RunsScreen())
        else:
            self.open_run(self.first_run)
            if self.probing is not None:
                self._open_probe(self.probing)

    async def on_unmount(self) -> None:
        ConsoleDriver.on_halt = None
        if self.session is not None:
            state = self.session.state
            self.left_running = "" if state.finished else state.run_id
            await self.session.stop()

    def open_run(self, run: RunDir) -> None:
        """Attach to a run and show its board."""
        session = Session(run, self.read_only, self.replay_speed, self.clock, self.wall)
        session.state.refresh_hz = self.refresh_hz
        self.session = session
        session.start()
        self.push_screen(BoardScreen(session))

    def _open_probe(self, probing: "Probing") -> None:
        """The probe's list on the board, and a sample on the list."""
        from console.screens.sample import SampleScreen

        self.open_screen("probe")
        if probing.row is not None and self.session is not None:
            self.push_screen(SampleScreen(self.session, probing.row, probing.against))

    async def _close_run(self) -> None:
        session, self.session = self.session, None
        if session is not None:
            await session.stop()

    def _set_rate(self, hz: float) -> None:
        self.refresh_hz = min(4.0, max(0.25, hz))
        if self.session is not None:
            self.session.state.refresh_hz = self.refresh_hz
        if self._paint_timer is not None:
            self._paint_timer.stop()
        self._paint_timer = self.set_interval(1 / self.refresh_hz, self.paint)

    def paint(self) -> None:
        """One tick: nothing is drawn while the terminal has not taken the last picture."""
        if self._exit or not self.screen_stack:
            return  # the timer outlives the last screen by a moment
        session = self.session
        if session is not None:
            problem = session.tick()
            if problem:
                self.say(f"the feed stopped: {problem}", "error")
            self._offer_summary(session)
        if isinstance(self._driver, ConsoleDriver) and self._driver.backlog > MAX_BACKLOG:
            return
        screen = self.screen
        if isinstance(screen, BaseScreen):
            screen.paint()
        elif session is not None:
            self._paint_below(session)

    def _paint_below(self, session: Session) -> None:
        """Under a dialog Textual sends the whole screen for every change (10 KB at 120x36), so only
        the news that count are told there: the run's state and the halt's account.
        """
        told = (session.state.state, session.state.view.halt)
        if told != self._told_below:
            self._told_below = told
            below = next(s for s in reversed(self.screen_stack) if isinstance(s, BaseScreen))
            below.paint()

    def _offer_summary(self, session: Session) -> None:
        """The last page opens by itself, once, when it arrives while somebody watches."""
        event = session.state.view.summary
        if (
            event is None
            or event.seq == self._summary_seen
            or not isinstance(self.screen, BoardScreen)
        ):
            return
        self._summary_seen = event.seq
        if event.seq > session.state.attached_seq:
            self.action_summary()

    def _display(self, screen: Screen[Any], renderable: RenderableType | None) -> None:
        """Textual's one way to the terminal; see console.update."""
        if isinstance(renderable, ChopsUpdate):
            renderable = ExactUpdate.of(renderable)
        super()._display(screen, renderable)

    def _refresh_themes(self) -> None:
        for screen in self.screen_stack:
            for widget in screen.query(Lines):
                widget.refresh_theme()

    def say(self, message: str, severity: str = "information") -> None:
        """A toast; the text may quote anybody."""
        level: Any = severity
        self.notify(clean(message), severity=level, markup=False, timeout=6)

    # ── moving about ─────────────────────────────────────────────────────────────────────────

    def open_screen(self, name: str) -> None:
        """A screen of the open run on top of the board; another one of its kind is replaced, not
        stacked.
        """
        session = self.session
        if session is None:
            self.say("open a run first", "warning")
            return
        from console.screens.chart import ChartScreen
        from console.screens.probe import ProbeScreen

        kinds: dict[str, type[BaseScreen]] = {
            "errors": ErrorsScreen,
            "log": LogScreen,
            "chart": ChartScreen,
            "probe": ProbeScreen,
        }
        if isinstance(self.screen, kinds[name]):
            return
        if isinstance(self.screen, BaseScreen) and not isinstance(self.screen, BoardScreen):
            self.switch_screen(kinds[name](session))
        else:
            self.push_screen(kinds[name](session))

    def action_probe(self) -> None:
        self.open_screen("probe")

    def action_errors(self) -> None:
        self.open_screen("errors")

    def action_log(self) -> None:
        self.open_screen("log")

    def action_chart(self) -> None:
        if self.config.low_bandwidth:
            self.say("charts are off with low_bandwidth")
            return
        self.open_screen("chart")

    def action_pane(self, number: int) -> None:
        if isinstance(self.screen, BoardScreen):
            self.screen.show_pane(number)

    def action_zoom(self) -> None:
        if isinstance(self.screen, BoardScreen):
            self.screen.zoom()

    def action_summary(self) -> None:
        state = self.session.state if self.session else None
        if state is None or state.view.summary is None:
            self.say("the summary comes at the end of the run")
            return
        self.push_screen(SummaryScreen(state.view.summary, state.view.evaluated))

    def action_help(self) -> None:
        screen = self.screen
        extra = (screen.help_keys or screen.extra_keys) if isinstance(screen, BaseScreen) else ()
        self.push_screen(HelpScreen(extra, self.read_only))

    async def action_back(self) -> None:
        screen = self.screen
        if isinstance(screen, ListScreen) and screen.close_filter():
            return
        if isinstance(screen, BoardScreen):
            if screen.has_class("-zoom"):
                screen.unzoom()
            elif self.first_run is None:
                await self._close_run()
                self.pop_screen()
            return
        if isinstance(screen, BaseScreen) and len(self.screen_stack) > 2:
            self.pop_screen()

    def action_filter(self) -> None:
        if isinstance(self.screen, ListScreen):
            self.screen.start_filter()
        else:
            self.open_screen("log")
            self.call_after_refresh(self._filter_soon)

    def _filter_soon(self) -> None:
        if isinstance(self.screen, ListScreen):
            self.screen.start_filter()

    # ── view ─────────────────────────────────────────────────────────────────────────────────

    def action_freeze(self) -> None:
        if self.session is not None:
            self.session.state.frozen = not self.session.state.frozen
            self.paint()

    def action_faster(self) -> None:
        self._set_rate(self.refresh_hz * 2)
        self.say(f"painting at {self.refresh_hz:g} Hz")

    def action_slower(self) -> None:
        self._set_rate(self.refresh_hz / 2)
        self.say(f"painting at {self.refresh_hz:g} Hz")

    def action_save_svg(self) -> None:
        name = f"eyas-{datetime.datetime.now():%Y%m%d-%H%M%S}.svg"
        try:
            path = self.save_screenshot(name)
        except OSError as e:
            self.say(f"screenshot: {e.strerror}; start the console in a writable folder", "error")
        else:
            self.say(f"saved {path}")

    # ── leaving ──────────────────────────────────────────────────────────────────────────────

    def action_hint(self) -> None:
        self.say("the run keeps going: q leaves the console, F12 halts the run")

    def action_detach(self) -> None:
        self.exit(0)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "pane" or action == "zoom":
            return isinstance(self.screen, BoardScreen)
        return True

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """The palette offers what the keys do, and the themes."""
        seen: set[str] = set()
        for a in actions.ACTIONS:
            if a.name in seen or a.name == "command_palette" or (a.mutates and self.read_only):
                continue
            seen.add(a.name)
            yield SystemCommand(f"{a.label} ({a.shown})", a.help, self._runner(a.name))
        for each in (theme.DARK, theme.LIGHT, theme.ANSI):
            yield SystemCommand(
                f"theme {each}",
                "colours of the console",
                lambda name=each: setattr(self, "theme", name),
            )

    def _runner(self, name: str) -> Callable[[], Any]:
        async def run() -> None:
            await self.run_action(name)

        return run
