"""Families of the corpus about tools: one call, two at once, a second, an answer, a refusal.

A job (weather, discount, ...) knows how people ask for it, what its tool returns and how the answer
reads; the families combine jobs.
"""

from collections.abc import Callable, Sequence
from typing import Any

from core.embedded import corpus_data as data
from core.embedded.corpus_draw import Draw, ExpectedCall, Turn, arguments_json
from core.schema import Message, Record

PREFACES = ("Let me check.", "One moment.")


class Ask(Record, frozen=True, kw_only=True):
    """One wish as a question, an order and a name; values by role, a result and the answer."""

    job: str
    question: str
    order: str
    want: str
    values: dict[str, Any]
    result: str
    answer: str


def _weather(d: Draw) -> Ask:
    town, degrees, sky = d.town(), d.number(1, 39), d.choice(data.SKIES)
    person = d.choice(("we", "you", "they"))
    questions = (
        f"What is the weather in {town}?",
        f"How is the weather in {town} today?",
        f"Do {person} need a coat in {town}?",
    )
    return Ask(
        job="weather",
        question=d.choice(questions),
        order=f"check the weather in {town}",
        want=f"the weather in {town}",
        values={"town": town},
        result=arguments_json({"temp": degrees, "sky": sky}),
        answer=f"It is {degrees} degrees and {sky} in {town}.",
    )


def _discount(d: Draw) -> Ask:
    price, percent, result = d.number(100, 999), d.number(11, 79), d.number(20, 980)
    item = d.choice(data.THINGS)
    questions = (
        f"What is the price of a {item} for {price} dollars with {percent} % off?",
        f"A {item} costs {price} dollars. What is {percent} % off?",
        f"Take {percent} % off {price} dollars.",
    )
    return Ask(
        job="discount",
        question=d.choice(questions),
        order=f"take {percent} % off {price} dollars",
        want=f"{percent} % off {price}",
        values={"percent": percent, "price": price},
        result=arguments_json({"result": result}),
        answer=f"The price is {result} dollars.",
    )


def _convert(d: Draw) -> Ask:
    value, result = d.number(10, 999), d.number(10, 999)
    source, target = d.choice(data.UNITS)
    questions = (
        f"Convert {value} {source} to {target}.",
        f"How many {target} are {value} {source}?",
        f"What is {value} {source} in {target}?",
    )
    return Ask(
        job="convert",
        question=d.choice(questions),
        order=f"convert {value} {source} to {target}",
        want=f"{value} {source} in {target}",
        values={"value": value, "source": source, "target": target},
        result=arguments_json({"result": result}),
        answer=f"{value} {source} are {result} {target}.",
    )


def _remind(d: Draw) -> Ask:
    person, time = d.person(), d.time()
    questions = (
        f"Remind {person} at {time}.",
        f"Can you remind {person} at {time}?",
        f"At {time}, please remind {person}.",
    )
    return Ask(
        job="remind",
        question=d.choice(questions),
        order=f"remind {person} at {time}",
        want=f"to remind {person} at {time}",
        values={"person": person, "time": time},
        result=arguments_json({"ok": True}),
        answer=f"Done, {person} gets a reminder at {time}.",
    )


def _distance(d: Draw) -> Ask:
    start, end, km = d.town(), d.town(), d.number(10, 999)
    questions = (
        f"How far is it from {start} to {end}?",
        f"How many km are it to {end} from {start}?",
        f"How long is the route from {start} to {end}?",
    )
    return Ask(
        job="distance",
        question=d.choice(questions),
        order=f"find the distance from {start} to {end}",
        want=f"the distance from {start} to {end}",
        values={"start": start, "end": end},
        result=arguments_json({"km": km}),
        answer=f"From {start} to {end} it is {km} km.",
    )


def _stock(d: Draw) -> Ask:
    item, count = d.item(), d.number(2, 99)
    questions = (
        f"Is the {item} in stock?",
        f"Do you have a {item}?",
        f"How many of the {item} are in stock?",
    )
    return Ask(
        job="stock",
        question=d.choice(questions),
        order=f"check the stock of the {item}",
        want=f"the stock of the {item}",
        values={"item": item},
        result=arguments_json({"count": count}),
        answer=f"There are {count} of the {item} in stock.",
    )


ASKS: dict[str, Callable[[Draw], Ask]] = {
    "weather": _weather,
    "discount": _discount,
    "convert": _convert,
    "remind": _remind,
    "distance": _distance,
    "stock": _stock,
}


def spelling_of(d: Draw, job: str) -> int:
    return d.choice(range(data.spellings(job)))


def call_of(ask: Ask, spelling: int) -> ExpectedCall:
    return ExpectedCall(
        name=data.tool_name(ask.job, spelling),
        arguments=data.tool_arguments(ask.job, spelling, ask.values),
    )


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _called(calls: Sequence[ExpectedCall], first_index: int, reasoning: str) -> Message:
    """An assistant message of the history that made these calls."""
    return {
        "role": "assistant",
        "content": "",
        "reasoning_content": reasoning,
        "tool_calls": [
            {
                "id": f"functions.{call.name}:{first_index + i}",
                "type": "function",
                "function": {"name": call.name, "arguments": arguments_json(call.arguments)},
            }
            for i, call in enumerate(calls)
        ],
    }


def _result(call: ExpectedCall, index: int, text: str) -> Message:
    return {
        "role": "tool",
        "tool_call_id": f"functions.{call.name}:{index}",
        "content": text,
    }


def _one(job: str) -> Callable[[Draw], Turn]:
    def family(d: Draw) -> Turn:
        ask, spelling = ASKS[job](d), spelling_of(d, job)
        call = call_of(ask, spelling)
        return Turn(
            messages=[_user(ask.question)],
            reasoning=f"The user wants {ask.want}. I call {call.name}.",
            content=d.choice(PREFACES) if d.chance(0.2) else "",
            calls=[call],
            needed=[(job, spelling)],
        )

    return family


def weather_two(d: Draw) -> Turn:
    first, second, spelling = _weather(d), _weather(d), spelling_of(d, "weather")
    towns = first.values["town"], second.values["town"]
    calls = [call_of(first, spelling), call_of(second, spelling)]
    questions = (
        "What is the weather in {} and in {}?",
        "Compare the weather in {} and {}.",
        "Is it warmer in {} or in {}?",
    )
    return Turn(
        messages=[_user(d.choice(questions).format(*towns))],
        reasoning=f"The user wants the weather in {towns[0]} and {towns[1]}."
        f" I call {calls[0].name} for both.",
        content=d.choice(PREFACES) if d.chance(0.2) else "",
        calls=calls,
        needed=[("weather", spelling)],
    )


def han_weather(d: Draw) -> Turn:
    town, spelling = d.han_town(), spelling_of(d, "weather")
    call = ExpectedCall(
        name=data.tool_name("weather", spelling),
        arguments=data.tool_arguments("weather", spelling, {"town": town}),
    )
    return Turn(
        messages=[_user(d.choice((f"{town}的天气怎么样？", f"今天{town}的天气好吗？")))],
        reasoning=f"用户想知道{town}的天气。",
        content="我来看看。" if d.chance(0.3) else "",
        calls=[call],
        needed=[("weather", spelling)],
    )


def second_call(d: Draw) -> Turn:
    """Two wishes in order. The first call is still to come, done, or part of an earlier turn."""
    jobs = d.shuffled(data.CALL_JOBS)[:2]
    asks = [ASKS[job](d) for job in jobs]
    needed = [(job, spelling_of(d, job)) for job in jobs]
    calls = [call_of(ask, s) for ask, (_, s) in zip(asks, needed, strict=True)]
    plans = [f"The user wants {a.want}. I call {c.name}." for a, c in zip(asks, calls, strict=True)]
    order = _user(f"First {asks[0].order}, then {asks[1].order}.")
    stage = d.choice(("first", "next", "next", "later"))
    if stage == "first":
        plan = f"First the user wants {asks[0].want}. I call {calls[0].name}."
        return Turn(messages=[order], reasoning=plan, calls=calls[:1], needed=needed)
    opening = _user(asks[0].question) if stage == "later" else order
    messages = [
        opening,
        _called(calls[:1], 0, plans[0]),
        _result(calls[0], 0, asks[0].result),
    ]
    if stage == "later":
        messages += [{"role": "assistant", "content": asks[0].answer}, _user(asks[1].question)]
        plan = plans[1]
    else:
        plan = f"Next the user wants {asks[1].want}. I call {calls[1].name}."
    return Turn(messages=messages, reasoning=plan, calls=calls[1:], needed=needed, first_index=1)


def tool_answer(d: Draw) -> Turn:
    """The result is there; the reply says it in words."""
    job = d.choice((*data.CALL_JOBS, "weather_two"))
    if job == "weather_two":
        return _two_answers(d)
    ask, spelling = ASKS[job](d), spelling_of(d, job)
    call = call_of(ask, spelling)
    return Turn(
        messages=[
            _user(ask.question),
            _called([call], 0, f"The user wants {ask.want}. I call {call.name}."),
            _result(call, 0, ask.result),
        ],
        reasoning=f"The result of {call.name} is there.",
        content=ask.answer,
        contains=[ask.answer],
        needed=[(job, spelling)],
        first_index=1,
    )


def _two_answers(d: Draw) -> Turn:
    spelling = spelling_of(d, "weather")
    asks = [_weather(d), _weather(d)]
    calls = [call_of(ask, spelling) for ask in asks]
    towns = [ask.values["town"] for ask in asks]
    plan = (
        f"The user wants the weather in {towns[0]} and {towns[1]}. I call {calls[0].name} for both."
    )
    return Turn(
        messages=[
            _user(f"Compare the weather in {towns[0]} and {towns[1]}."),
            _called(calls, 0, plan),
            *[_result(calls[i], i, asks[i].result) for i in range(2)],
        ],
        reasoning="Both results are there.",
        content=f"{asks[0].answer} {asks[1].answer}",
        contains=[ask.answer for ask in asks],
        needed=[("weather", spelling)],
        first_index=2,
    )


def refusal(d: Draw) -> Turn:
    """Tools are declared, but not the one that the wish needs."""
    job = d.choice(data.CALL_JOBS)
    ask = ASKS[job](d)
    return Turn(
        messages=[_user(ask.question)],
        reasoning=f"The user wants {ask.want}. None of the tools fits.",
        content=f"I am sorry, I have no tool for this: {ask.want}.",
        contains=["no tool", *[str(v) for v in ask.values.values()]],
        barred=[job],
        tool_share=1.0,
    )


CALL_FAMILIES: dict[str, Callable[[Draw], Turn]] = {
    "discount": _one("discount"),
    "convert": _one("convert"),
    "weather": _one("weather"),
    "weather_two": weather_two,
    "remind": _one("remind"),
    "distance": _one("distance"),
    "stock": _one("stock"),
    "han_weather": han_weather,
    "second_call": second_call,
    "tool_answer": tool_answer,
    "refusal": refusal,
}
