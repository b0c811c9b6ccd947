"""Words, values and tools that the corpus is made of. Plain data: no randomness, no templates.

Open values (towns, people, things, numbers, times) are products of small parts, so that a value
never seen in training is still made of tokens that were. The products are large: of a small pool a
model learns the members by heart and then cannot copy a new one.
"""

from typing import Any

from core.schema import Tool


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Names: heads, middles, tails.
TOWNS = (
    _words(
        "Nor Ash Oak Kel Brim Stan Wood Lyn Mar Thorn Hal Cor Raven"
        " Elm Win Bar Fox Gran Hart Mil Red Sal Tam Wes Dun Fen"
    ),
    _words("er en ing le an o el is"),
    _words("vale ford port ton wick mere field stead brook gate haven moor"),
)
PERSONS = (
    _words("Mi To Ka Le Sa Ro Ni Da Jo Be Lu Ve Fa Ti Za Pe"),
    _words("ka lo ne su ri ta pe du"),
    _words("ra bin lan mo nia rek vi sa dor li"),
)
HAN_PERSONS = ("王李张刘陈林高马", "明华文丽强安云春", "明华文丽强安云春")
HAN_TOWNS = ("东西南北上长青白", "安明云春林高华文", "山海江城湖州")
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

# Each job has up to two spellings of its tool: name, description, and properties as name -> role,
# sorted by name: the order in which they are declared and written.
_JOBS: dict[str, tuple[tuple[str, str, dict[str, str]], ...]] = {
    "weather": (
        ("get_weather", "Weather in a city", {"city": "town"}),
        ("weather_now", "Weather of a place", {"place": "town"}),
    ),
    "discount": (
        ("apply_discount", "Price after a discount", {"percent": "percent", "price": "price"}),
        ("sale_price", "Price in a sale", {"amount": "price", "percent": "percent"}),
    ),
    "convert": (
        ("convert_units", "Convert a value", {"from": "source", "to": "target", "value": "value"}),
        ("unit_convert", "Convert units", {r: r for r in ("source", "target", "value")}),
    ),
    "remind": (
        ("set_reminder", "Remind a person", {"person": "person", "time": "time"}),
        ("add_reminder", "Set a reminder", {"name": "person", "time": "time"}),
    ),
    "distance": (
        ("get_distance", "Distance of two cities", {"end": "end", "start": "start"}),
        ("route_length", "Length of a route", {"from": "start", "to": "end"}),
    ),
    "stock": (
        ("check_stock", "Is an item in stock", {"item": "item"}),
        ("find_item", "Find an item in stock", {"name": "item"}),
    ),
    "music": (("play_music", "Play music", {"song": "song"}),),
    "mail": (("send_mail", "Send a mail", {"text": "text", "to": "to"}),),
    "timer": (("start_timer", "Start a timer", {"minutes": "minutes"}),),
}
_NUMBERS = ("percent", "price", "value", "minutes")
"""Roles of the type `number`; all others are strings."""
CALL_JOBS = ("weather", "discount", "convert", "remind", "distance", "stock")
JOBS = tuple(_JOBS)


def spellings(job: str) -> int:
    return len(_JOBS[job])


def tool_name(job: str, spelling: int) -> str:
    return _JOBS[job][spelling][0]


def tool_arguments(job: str, spelling: int, values: dict[str, Any]) -> dict[str, Any]:
    """Values by role become arguments by declared name, in declared order."""
    return {name: values[role] for name, role in _JOBS[job][spelling][2].items()}


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
                "properties": {
                    key: {"type": "number" if role in _NUMBERS else "string"}
                    for key, role in properties.items()
                },
                "required": list(properties),
            },
        },
    }
