"""Keys are data: what can be done, with which key, where it is shown. Bindings, footer, help and
palette read this.
"""

from typing import NamedTuple

from textual.binding import Binding


class Action(NamedTuple):
    """`keys` as Textual spells them; `key` and `word`: what people read instead of keys and name.
    `priority` keys work in every focus, dialogs included.
    """

    name: str
    keys: str
    group: str
    help: str
    key: str = ""
    word: str = ""
    mutates: bool = False
    priority: bool = False

    @property
    def shown(self) -> str:
        return self.key or self.keys

    @property
    def label(self) -> str:
        return self.word or self.name


ACTIONS: tuple[Action, ...] = (
    Action("halt", "f12,ctrl+x", "Run",
           "stop at once: no new request, nothing that arrived is lost. No question is asked",
           key="F12", word="HALT", mutates=True, priority=True),
    Action("drain", "d", "Run", "send nothing new, let what is in flight finish", mutates=True),
    Action("resume", "r", "Run", "go on after a halt (asks first: it spends money)", mutates=True),
    Action("sever", "X", "Run",
           "after HALT: cut what still arrives (asks first: its cost stays uncertain)",
           mutates=True),
    Action("kill", "K", "Run", "SIGTERM, then SIGKILL (asks for the run id)", mutates=True),
    Action("abandon", "A", "Run",
           "never ask what is pending, settle the books (asks for the run id)", mutates=True),
    Action("pane(1)", "1", "Panes", "requests in flight, outcomes, rates", word="requests"),
    Action("pane(2)", "2", "Panes", "each provider: load, latency, errors, cost", word="providers"),
    Action("pane(3)", "3", "Panes", "spent, reserved, uncertain, burn, forecast", word="spend"),
    Action("pane(4)", "4", "Panes", "GPUs, or the machine", word="host"),
    Action("pane(5)", "5", "Panes",
           "loss, accuracy of each draft step, acceptance", word="training"),
    Action("pane(6)", "6", "Panes", "verdicts, audit, errors", word="quality"),
    Action("pane(7)", "7", "Panes", "the log's end", word="log"),
    Action("zoom", "z,m", "Panes", "the focused pane on the whole screen, and back", key="z"),
    Action("probe", "p", "Screens", "samples: tokens, verdict, difference to the local twin"),
    Action("errors", "e", "Screens", "errors by provider and class, with an example"),
    Action("log", "l", "Screens", "log, operators' commands, tripwires"),
    Action("chart", "c", "Screens", "loss and accuracy, large"),
    Action("summary", "s", "Screens", "what was made, what it cost, how exact, what it gains"),
    Action("help", "question_mark,f1", "Screens", "this page", key="?"),
    Action("back", "escape", "Screens", "back to where you came from", key="esc"),
    Action("filter", "slash", "View", "show only matching rows", key="/"),
    Action("freeze", "space", "View", "stop painting; data keeps arriving"),
    Action("faster", "plus,equals_sign", "View",
           "paint more often (up to 4 times a second)", key="+"),
    Action("slower", "minus", "View", "paint less often", key="-"),
    Action("save_svg", "S", "View",
           "save the screen as SVG in the current folder", word="screenshot"),
    Action("command_palette", "colon", "View", "find an action by name", key=":", word="palette"),
    Action("detach", "q", "Leave", "leave the console; the run goes on"),
    Action("detach", "ctrl+q", "Leave", "the same, in every focus", priority=True),
    Action("hint", "ctrl+c", "Leave", "says how to leave and how to halt", priority=True),
    Action("hint", "ctrl+z", "Leave", "the same", priority=True),
)  # fmt: skip

_COMMON = ("probe", "errors", "log", "zoom", "chart")
RUNNING_FOOTER = ("halt", "detach", "help", "drain", *_COMMON, "kill", "freeze")
HALTING_FOOTER = ("sever", "detach", "help", *_COMMON, "kill")
STOPPED_FOOTER = ("resume", "detach", "help", *_COMMON, "summary")
DONE_FOOTER = ("detach", "help", "summary", *_COMMON)
LIST_FOOTER = ("detach", "help", "filter")
SAMPLE_KEYS = (("n/p", "next"), ("t", "view"), ("/", "find"), ("#", "index"), ("x", "twin"))
SAMPLE_MORE = (("f", "only diffs"), ("i", "ids"), ("w", "spaces"), ("b", "bytes"))
SAMPLE_HELP = (
    ("n, p", "next and previous divergence, part of the reply, or match of a search"),
    ("t", "as text, as a table, beside the twin"),
    ("d", "beside the twin, and back"),
    ("/", "find text (over token borders) or an id; esc leaves the search"),
    ("#", "go to a token by its index"),
    ("x", "the next sample of the same question as the twin"),
    ("f", "only what differs, with three rows around it"),
    ("i", "ids"),
    ("w", "every space as a glyph"),
    ("b", "bytes instead of text"),
)


def bindings() -> list[Binding]:
    """One app-level binding per action and key set."""
    return [
        Binding(
            a.keys,
            a.name,
            a.label,
            show=False,
            priority=a.priority,
            id=f"{a.name.split('(')[0]}-{a.keys.replace('+', '-').split(',')[0]}",
            tooltip=a.help,
        )
        for a in ACTIONS
    ]


def by_name(name: str) -> Action:
    return next(a for a in ACTIONS if a.name == name)


def footer_keys(names: tuple[str, ...], read_only: bool = False) -> list[tuple[str, str]]:
    """Key and label, without what a read-only console may not do."""
    chosen = [by_name(name) for name in names]
    return [(a.shown, a.label) for a in chosen if not (read_only and a.mutates)]
