"""What an operator may do to a run from the console: halt, drain, resume, sever, kill, abandon.

HALT asks nothing; whatever destroys or spends asks first, with Cancel as the default. Mixed into
the application.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from console import format as f
from console.screens.modal import ConfirmScreen
from console.session import Session
from core.errors import EyasError

if TYPE_CHECKING:
    from textual.app import App

    Base = App[int]
else:
    Base = object

OFFER_KILL_S = 3.0


class Steering(Base):
    """Needs `session`, `read_only`, `clock`, `say` and `paint` of the application."""

    session: Session | None
    read_only: bool
    clock: Callable[[], float]
    _halt_presses: list[float]

    def say(self, message: str, severity: str = "information") -> None:
        raise NotImplementedError

    def paint(self) -> None:
        raise NotImplementedError

    # ── halting ──────────────────────────────────────────────────────────────────────────────

    def _halt_from_input_thread(self, source: str) -> None:
        """Called in the input thread, before the event loop hears of the key."""
        session = self.session
        if session is not None and session.halt_channel is not None and not self.read_only:
            session.halt_channel.fire(source)

    def action_halt(self) -> None:
        if self.session is None:
            self.say("open a run first; eyas halt RUN works from any shell", "warning")
            return
        now = self.clock()
        again = [t for t in self._halt_presses if now - t <= OFFER_KILL_S]
        self._halt_presses = [*again, now]
        if message := self.session.halt("key"):
            self.say(message, "warning")
        if again and not self.session.state.finished and not isinstance(self.screen, ConfirmScreen):
            self._halt_presses.clear()
            self.action_kill()
        self.paint()

    # ── steering ─────────────────────────────────────────────────────────────────────────────

    def _may_steer(self, what: str) -> Session | None:
        if self.session is None:
            self.say("open a run first", "warning")
        elif self.read_only or self.session.state.read_only:
            self.say(f"{what}: this console is read-only; attach without --read-only", "warning")
        else:
            return self.session
        return None

    def _steer(self, work: Callable[[], Any]) -> None:
        """Run a steering coroutine; errors become toasts."""

        async def run() -> None:
            try:
                result = await work()
            except EyasError as e:
                self.say(str(e), "error")
            else:
                if result:
                    self.say(str(result))
            self.paint()

        self.run_worker(run(), group="steer", exclusive=False)

    def action_drain(self) -> None:
        if (session := self._may_steer("drain")) is not None:
            self._steer(lambda: session.command("drain", "console"))

    def action_resume(self) -> None:
        session = self._may_steer("resume")
        if session is None:
            return
        if not session.state.finished:
            word = session.state.state
            wait = word in ("halting", "draining")
            self.say(f"{word}: r when it has stopped" if wait else f"nothing to resume: {word}")
            return
        generate = session.state.view.stages.get("generate")
        used_up = session.state.view.reason.startswith("budget")
        left = max(0.0, session.state.budget_usd - session.state.spent_usd)
        text = (
            "Nothing is left to send; the run goes on where it stopped."
            if generate is not None and generate.status == "done"
            else f"Requests are sent again; {f.usd(left)} of the budget are left"
            + (" (--set run.budget_usd=USD gives more). " if used_up else ". ")
            + "The run goes on where it stopped."
        )
        self._ask("Resume the run?", text, "Resume", "Stay halted", session.resume)

    def action_sever(self) -> None:
        session = self._may_steer("sever")
        if session is None:
            return
        stats = session.state.view.stats
        count = stats.in_flight if stats else 0
        text = (
            f"{count:,} replies still arrive and are paid for. Cut now, they are lost, and their "
            "cost stays uncertain until it is looked up."
        )
        self._ask(
            "Sever everything?",
            text,
            "Sever",
            "Let them arrive",
            lambda: session.command("sever", "console"),
        )

    def action_kill(self) -> None:
        session = self._may_steer("kill")
        if session is None:
            return
        text = (
            "SIGTERM now, SIGKILL after ten seconds. What arrived is kept; HALT is the gentler "
            f"way. Type the run id to go on: {session.run.run_id}"
        )
        self._ask(
            "Kill the engine?",
            text,
            "Kill run",
            "Keep running",
            session.kill,
            typed=session.run.run_id,
        )

    def action_abandon(self) -> None:
        session = self._may_steer("abandon")
        if session is None:
            return
        if not session.state.finished:
            self.say(f"{session.state.state}: halt it first, then A")
            return
        stats = session.state.view.stats
        left = stats.prompts - stats.done if stats else 0
        text = (
            f"{left:,} prompts are never asked, not by resume either; open bills are looked up. "
            f"Resume then goes on with the rest. Type the run id: {session.run.run_id}"
        )
        self._ask(
            "Abandon what is pending?",
            text,
            "Abandon",
            "Keep it pending",
            session.abandon,
            typed=session.run.run_id,
        )

    def _ask(
        self, title: str, text: str, verb: str, keep: str, work: Callable[[], Any], typed: str = ""
    ) -> None:
        def answered(yes: bool | None) -> None:
            if yes:
                self._steer(work)

        self.push_screen(ConfirmScreen(title, text, verb, keep, typed), answered)
