"""Words, values and tools that the corpus is made of. Plain data: no randomness, no templates.

Open values (towns, people, things, numbers, times) are products of small parts, so that a value
never seen in training is still made of tokens that were. The products are large: of a small pool a
model learns the members by heart and then cannot copy a new one.
"""

from typing import Any

from core.schema import Tool


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


TOWN_HEADS = _words(
    "Nor Ash Oak Kel Brim Stan Wood Lyn Mar Thorn Hal Cor Raven"
    " Elm Win Bar Fox Gran Hart Mil Red Sal Tam Wes Dun Fen"
)
TOWN_MIDDLES = _words("er en ing le an o el is")
TOWN_TAILS = _words("vale ford port ton wick mere field stead brook gate haven moor")
PERSON_HEADS = _words("Mi To Ka Le Sa Ro Ni Da Jo Be Lu Ve Fa Ti Za Pe")
PERSON_MIDDLES = _words("ka lo ne su ri ta pe du")
PERSON_TAILS = _words("ra bin lan mo nia rek vi sa dor li")
COLOURS = _words("red blue green black white yellow silver brown small large old new")
THINGS = _words("lamp chair table bag coat shirt clock phone cup book desk bike tent radio pen box")
WEEKDAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
UNITS = (
    ("km", "miles"),
    ("miles", "km"),
    ("kg", "pounds"),
    ("pounds", "kg"),
    ("liters", "gallons"),
    ("gallons", "liters"),
    ("meters", "feet"),
    ("feet", "meters"),
    ("euros", "dollars"),
    ("dollars", "euros"),
)
SKIES = ("sunny", "cloudy", "rainy", "windy")
EMOJI = ("🌟", "🌊", "🍎", "🚀", "🎉", "🐱", "🌙", "🔥", "🎵", "❤️")
EMOJI_NAMES = ("star", "wave", "apple", "rocket", "party", "cat", "moon", "fire", "music", "heart")
HAN_SURNAMES = "王李张刘陈林高马"
HAN_NAMES = "明华文丽强安云春"
HAN_TOWN_HEADS = "东西南北上长青白"
HAN_TOWN_MIDDLES = "安明云春林高华文"
HAN_TOWN_TAILS = "山海江城湖州"
HAN_DIGITS = ("一", "二", "三", "四", "五")

MARKERS = (
    ("<|im_end|>", "closes a message"),
    ("<|im_user|>", "starts a user message"),
    ("<think>", "opens the reasoning"),
    ("</think>", "closes the reasoning"),
    ("<|tool_calls_section_begin|>", "opens the tool calls"),
    ("<|tool_call_end|>", "closes one tool call"),
)

OPERATIONS = (
    ("add", "adds", "+"),
    ("subtract", "subtracts", "-"),
    ("multiply", "multiplies by", "*"),
)

# Each job has up to two spellings of its tool: name, description, and properties as
# name -> (role, type), sorted by name: the order in which they are declared and written.
Properties = dict[str, tuple[str, str]]
_JOBS: dict[str, tuple[tuple[str, str, Properties], ...]] = {
    "weather": (
        ("get_weather", "Weather in a city", {"city": ("town", "string")}),
        ("weather_now", "Weather of a place", {"place": ("town", "string")}),
    ),
    "discount": (
        (
            "apply_discount",
            "Price after a discount",
            {"percent": ("percent", "number"), "price": ("price", "number")},
        ),
        (
            "sale_price",
            "Price in a sale",
            {"amount": ("price", "number"), "percent": ("percent", "number")},
        ),
    ),
    "convert": (
        (
            "convert_units",
            "Convert a value",
            {
                "from": ("source", "string"),
                "to": ("target", "string"),
                "value": ("value", "number"),
            },
        ),
        (
            "unit_convert",
            "Convert units",
            {
                "source": ("source", "string"),
                "target": ("target", "string"),
                "value": ("value", "number"),
            },
        ),
    ),
    "remind": (
        (
            "set_reminder",
            "Remind a person",
            {"person": ("person", "string"), "time": ("time", "string")},
        ),
        (
            "add_reminder",
            "Set a reminder",
            {"name": ("person", "string"), "time": ("time", "string")},
        ),
    ),
    "distance": (
        (
            "get_distance",
            "Distance of two cities",
            {"end": ("end", "string"), "start": ("start", "string")},
        ),
        (
            "route_length",
            "Length of a route",
            {"from": ("start", "string"), "to": ("end", "string")},
        ),
    ),
    "stock": (
        ("check_stock", "Is an item in stock", {"item": ("item", "string")}),
        ("find_item", "Find an item in stock", {"name": ("item", "string")}),
    ),
    "music": (("play_music", "Play music", {"song": ("song", "string")}),),
    "mail": (("send_mail", "Send a mail", {"text": ("text", "string"), "to": ("to", "string")}),),
    "timer": (("start_timer", "Start a timer", {"minutes": ("minutes", "number")}),),
}
CALL_JOBS = ("weather", "discount", "convert", "remind", "distance", "stock")
JOBS = tuple(_JOBS)


def spellings(job: str) -> int:
    return len(_JOBS[job])


def tool_name(job: str, spelling: int) -> str:
    return _JOBS[job][spelling][0]


def tool_arguments(job: str, spelling: int, values: dict[str, Any]) -> dict[str, Any]:
    """Values by role become arguments by declared name, in declared order."""
    return {name: values[role] for name, (role, _) in _JOBS[job][spelling][2].items()}


def tool_schema(job: str, spelling: int) -> Tool:
    """The declaration in OpenAI form; every property is required."""
    name, description, properties = _JOBS[job][spelling]
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": kind} for key, (_, kind) in properties.items()},
                "required": list(properties),
            },
        },
    }
