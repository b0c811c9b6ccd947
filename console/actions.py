"""Keys are data: what can be done, with which key, where it is shown. Bindings, footer, help and
palette read this.
"""

from typing import NamedTuple

from textual.binding import Binding


class Action(NamedTuple):
    """`keys` as Textual spells them; `shown` as people do. `priority` keys work in every focus,
    dialogs included.
    """

    name: str
    keys: str
    shown: str
    label: str
    help: str
    group: str
    mutates: bool = False
    priority: bool = False


ACTIONS: tuple[Action, ...] = (
    Action(
        "halt",
        "f12,ctrl+x",
        "F12",
        "HALT",
        "stop at once: no new request, nothing that arrived is lost. No question is asked",
        "Run",
        True,
        True,
    ),
    Action(
        "drain", "d", "d", "drain", "send nothing new, let what is in flight finish", "Run", True
    ),
    Action(
        "resume",
        "r",
        "r",
        "resume",
        "go on after a halt (asks first: it spends money)",
        "Run",
        True,
    ),
    Action(
        "sever",
        "X",
        "X",
        "sever",
        "after HALT: cut what still arrives (asks first: its cost stays uncertain)",
        "Run",
        True,
    ),
    Action("kill", "K", "K", "kill", "SIGTERM, then SIGKILL (asks for the run id)", "Run", True),
    Action(
        "abandon",
        "A",
        "A",
        "abandon",
        "never ask what is pending, settle the books (asks for the run id)",
        "Run",
        True,
    ),
    Action("pane(1)", "1", "1", "requests", "requests in flight, outcomes, rates", "Panes"),
    Action("pane(2)", "2", "2", "providers", "each provider: load, latency, errors, cost", "Panes"),
    Action("pane(3)", "3", "3", "spend", "spent, reserved, uncertain, burn, forecast", "Panes"),
    Action("pane(4)", "4", "4", "host", "GPUs, or the machine", "Panes"),
    Action(
        "pane(5)", "5", "5", "training", "loss, accuracy of each draft step, acceptance", "Panes"
    ),
    Action("pane(6)", "6", "6", "quality", "verdicts, audit, errors", "Panes"),
    Action("pane(7)", "7", "7", "log", "the log's end", "Panes"),
    Action("zoom", "z,m", "z", "zoom", "the focused pane on the whole screen, and back", "Panes"),
    Action(
        "probe",
        "p",
        "p",
        "probe",
        "samples: tokens, verdict, difference to the local twin",
        "Screens",
    ),
    Action(
        "errors", "e", "e", "errors", "errors by provider and class, with an example", "Screens"
    ),
    Action("log", "l", "l", "log", "log, operators' commands, tripwires", "Screens"),
    Action("chart", "c", "c", "chart", "loss and accuracy, large", "Screens"),
    Action(
        "summary",
        "s",
        "s",
        "summary",
        "what was made, what it cost, how exact, what it gains",
        "Screens",
    ),
    Action("help", "question_mark,f1", "?", "help", "this page", "Screens"),
    Action("back", "escape", "esc", "back", "back to where you came from", "Screens"),
    Action("filter", "slash", "/", "filter", "show only matching rows", "View"),
    Action("freeze", "space", "space", "freeze", "stop painting; data keeps arriving", "View"),
    Action(
        "faster",
        "plus,equals_sign",
        "+",
        "faster",
        "paint more often (up to 4 times a second)",
        "View",
    ),
    Action("slower", "minus", "-", "slower", "paint less often", "View"),
    Action(
        "save_svg", "S", "S", "screenshot", "save the screen as SVG in the current folder", "View"
    ),
    Action("command_palette", "colon", ":", "palette", "find an action by name", "View"),
    Action("detach", "q", "q", "detach", "leave the console; the run goes on", "Leave"),
    Action(
        "detach", "ctrl+q", "ctrl+q", "detach", "the same, in every focus", "Leave", False, True
    ),
    Action(
        "hint",
        "ctrl+c",
        "ctrl+c",
        "hint",
        "says how to leave and how to halt",
        "Leave",
        False,
        True,
    ),
    Action("hint", "ctrl+z", "ctrl+z", "hint", "the same", "Leave", False, True),
)

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
