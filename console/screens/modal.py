"""Dialogs: help, confirmations with Cancel as the default, a typed confirmation for what destroys,
the last page.
"""

from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Button, Input, Label

from console.actions import ACTIONS
from console.sanitize import cell, clean, wrap
from console.summary import summary_lines
from console.widgets.line import Line, line
from console.widgets.lines import Lines
from core.events import Evaluated, Summary


class Dialog(ModalScreen[bool]):
    """Escape is Cancel; `y` is not bound on purpose."""

    CSS_PATH = "modal.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "cancel", "Cancel", show=False)]

    def action_cancel(self) -> None:
        self.dismiss(False)


class ConfirmScreen(Dialog):
    """A question with two verbs. Dismisses True only when the verb was chosen."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left,right,tab", "app.focus_next", show=False, priority=True),
    ]

    def __init__(self, title: str, question: str, verb: str, keep: str, typed: str = "") -> None:
        super().__init__()
        self._title, self._question, self._verb, self._keep, self._typed = (
            title,
            question,
            verb,
            keep,
            typed,
        )

    def compose(self) -> ComposeResult:
        with Vertical(id="dialog") as box:
            box.border_title = Content(clean(self._title))
            yield Label("\n".join(wrap(self._question, 56)), markup=False, id="question")
            if self._typed:
                yield Input(placeholder="the run id", id="typed")
            with Horizontal(id="buttons"):
                yield Button(self._keep, id="keep", flat=True)
                yield Button(self._verb, id="act", disabled=bool(self._typed), flat=True)

    def on_mount(self) -> None:
        self.query_one("#typed" if self._typed else "#keep").focus()

    @on(Input.Changed)
    def _check(self, event: Input.Changed) -> None:
        self.query_one("#act", Button).disabled = event.value.strip() != self._typed

    @on(Input.Submitted)
    def _submit(self, event: Input.Submitted) -> None:
        if event.value.strip() == self._typed:
            self.query_one("#act", Button).focus()

    @on(Button.Pressed)
    def _pressed(self, event: Button.Pressed) -> None:
        self.dismiss(event.button.id == "act")


class PageScreen(Dialog):
    """A page of lines in a box; any of escape, enter, q closes it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,enter,q", "cancel", "Close", show=False, priority=True),
        Binding("question_mark,f1", "cancel", show=False),
    ]
    title_text = ""

    def compose(self) -> ComposeResult:
        page = Lines("page").add_class("pane", "-scroll")
        page.border_title = Content(clean(self.title_text))
        page.border_subtitle = "esc closes"
        yield page

    def on_mount(self) -> None:
        self.query_one("#page", Lines).focus()
        self.call_after_refresh(self.fill)

    def on_resize(self) -> None:
        self.call_after_refresh(self.fill)

    def fill(self) -> None:
        page = self.query_one("#page", Lines)
        page.set_lines(self.lines(page.room[0]))

    def lines(self, width: int) -> list[Line]:
        raise NotImplementedError


class HelpScreen(PageScreen):
    """All keys, made from the table of actions."""

    title_text = "Keys"

    def __init__(self, extra: tuple[tuple[str, str], ...] = (), read_only: bool = False) -> None:
        super().__init__()
        self._extra, self._read_only = extra, read_only

    def lines(self, width: int) -> list[Line]:
        out: list[Line] = []
        group = ""
        if self._extra:
            out.append(line(("This screen", "bold")))
            for key, label in self._extra:
                for n, part in enumerate(wrap(label, width - 17)):
                    out.append(line((f"  {cell(key if n == 0 else '', 14)} ", "ok"), part))
        for action in ACTIONS:
            if action.group != group:
                group = action.group
                out += [line(" "), line((group, "bold"))] if out else [line((group, "bold"))]
            keys = action.shown if action.name != "halt" else "F12 or ctrl+x"
            off = self._read_only and action.mutates
            style = "dim" if off else "ok"
            text = "not in a read-only console" if off else action.help
            for n, part in enumerate(wrap(text, width - 17)):
                lead = cell(keys, 14) if n == 0 else " " * 14
                out.append(line((f"  {lead} ", style), (part, "dim" if off else "text")))
        out += [
            line(" "),
            line(("The run lives in its own process. Leaving the console never stops it.", "dim")),
        ]
        return out


class SummaryScreen(PageScreen):
    """The run's last page: made, cost, exact, gained."""

    title_text = "✓ What this run made"

    def __init__(self, event: Summary, evaluated: Evaluated | None) -> None:
        super().__init__()
        self._event, self._evaluated = event, evaluated

    def lines(self, width: int) -> list[Line]:
        return summary_lines(self._event, self._evaluated, width)


class TextScreen(PageScreen):
    """A longer text, already cleaned and wrapped by its caller."""

    def __init__(self, title: str, content: list[str]) -> None:
        self.title_text = title
        super().__init__()
        self._content = content

    def lines(self, width: int) -> list[Line]:
        return [line(part) for text in self._content for part in wrap(text, width)]
