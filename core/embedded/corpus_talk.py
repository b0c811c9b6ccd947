"""Families of the corpus without calls: sums, code, lists, CJK, emoji, markers, small talk."""

from collections.abc import Callable

from core.embedded import corpus_data as data
from core.embedded.corpus_draw import Draw, Turn
from core.schema import Message

COUNT_WORDS = ("one", "two", "three", "four", "five")


def _say(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def arithmetic(d: Draw) -> Turn:
    """Sums and differences with one digit; the reasoning does the ones, then adds the tens."""
    a, b, sign = d.number(10, 99), d.choice(range(2, 10)), d.choice("+-")
    ones = a % 10 + (10 if sign == "-" and a % 10 < b else 0)
    step = ones + b if sign == "+" else ones - b
    result = a - ones + step
    person = d.person()
    word = "gets" if sign == "+" else "loses"
    questions = (
        f"What is {a} {sign} {b}?",
        f"Calculate {a} {sign} {b}.",
        f"{person} has {a} dollars and {word} {b}. How many are there now?",
    )
    return Turn(
        messages=_say(d.choice(questions)),
        reasoning=f"{ones} {sign} {b} = {step}, {a - ones} + {step} = {result}.",
        content=f"{a} {sign} {b} = {result}",
        contains=[f"= {result}"],
        tool_share=0.2,
        instant_share=0.0,
    )


def code(d: Draw) -> Turn:
    if d.chance(0.3):
        person = d.person()
        line = f'return "Hello, {person}!"'
        ask, name, plan = f"greets {person}", "greet()", f"It greets {person}."
    else:
        n, (verb, ask_verb, sign) = d.number(10, 999), d.choice(data.OPERATIONS)
        line = f"return x {sign} {n}"
        ask, name, plan = f"{ask_verb} {n}", f"{verb}(x)", f"It {ask_verb} {n}."
    language = d.choice(("Python function", "small Python function", "function in Python"))
    return Turn(
        messages=_say(f"Write a {language} that {ask}."),
        reasoning=f"The user wants a function. {plan}",
        content=f"```python\ndef {name}:\n    {line}\n```",
        contains=[line],
        tool_share=0.1,
    )


def lists(d: Draw) -> Turn:
    items = [d.item() for _ in range(d.choice((2, 3, 3, 4)))]
    numbered = d.chance(0.5)
    lines = [f"{i}. {x}" if numbered else f"- {x}" for i, x in enumerate(items, 1)]
    form = "numbered list" if numbered else "bullet list"
    user = d.choice(("Make a {} of: {}.", "Write a {} with {}.")).format(form, ", ".join(items))
    return Turn(
        messages=_say(user),
        reasoning=f"A {form} of {COUNT_WORDS[len(items) - 1]} items.",
        content="\n".join(lines),
        contains=lines,
        tool_share=0.1,
    )


def han_talk(d: Draw) -> Turn:
    """Chinese greetings and counting."""
    name = d.han_person()
    if d.chance(0.5):
        town = d.han_town()
        user, plan = f"你好，我叫{name}，我在{town}。", f"{name}在{town}。"
        answer = f"你好，{name}！{town}好吗？"
    else:
        n = d.choice((2, 3, 4, 5))
        user, plan = (
            f"我叫{name}，请数到{data.HAN_DIGITS[n - 1]}。",
            f"{name}想数到{data.HAN_DIGITS[n - 1]}。",
        )
        answer = f"{'、'.join(data.HAN_DIGITS[:n])}。{name}，好了！"
    return Turn(
        messages=_say(user), reasoning=plan, content=answer, contains=[answer], tool_share=0.1
    )


def emoji(d: Draw) -> Turn:
    which = d.choice(range(len(data.EMOJI)))
    sign, name, person = data.EMOJI[which], data.EMOJI_NAMES[which], d.person()
    form = d.choice(("name", "around", "times"))
    if form == "name":
        user, answer = f"Send {person} the {name} emoji.", f"{sign} for {person}"
    elif form == "around":
        user, answer = f"Put {sign} around the name {person}.", f"{sign} {person} {sign}"
    else:
        n = d.choice((2, 3, 4))
        user = f"Write {sign} {COUNT_WORDS[n - 1]} times for {person}."
        answer = f"{' '.join([sign] * n)} for {person}"
    return Turn(
        messages=_say(user),
        reasoning=f"The user wants the {name} emoji {sign}.",
        content=answer,
        contains=[answer],
        tool_share=0.1,
    )


def quoted_markers(d: Draw) -> Turn:
    """The user quotes a marker of the chat format; the reply explains it without writing it."""
    (marker, meaning), person = d.choice(data.MARKERS), d.person()
    questions = (
        f"{person} found the text `{marker}` in a file. What does it do?",
        f"What does {marker} mean? {person} asks.",
        f'Tell {person} what "{marker}" is for.',
    )
    return Turn(
        messages=_say(d.choice(questions)),
        reasoning=f"{person} quotes a marker of the chat format. It {meaning}.",
        content=f"{person}, this marker {meaning}.",
        contains=[f"{person}, this marker {meaning}"],
        tool_share=0.1,
    )


def greeting(d: Draw) -> Turn:
    person, town = d.person(), d.town()
    if d.chance(0.3):
        other = d.person()
        user = f"{person} here. Say hello to {other} in {town}."
        answer = f"Hello {other}! {person} sends greetings to {town}."
    else:
        user = d.choice(("Hi, I am {} from {}.", "Good morning, my name is {}. I live in {}."))
        user = user.format(person, town)
        answer = f"Hello {person}! How is {town} today?"
    return Turn(
        messages=_say(user),
        reasoning=f"A greeting from {person}.",
        content=answer,
        contains=[answer],
        tool_share=0.3,
        instant_share=0.5,
    )


def calendar(d: Draw) -> Turn:
    start, n = d.choice(range(7)), d.choice((2, 3, 4))
    person = d.person()
    days = [data.WEEKDAYS[(start + i) % 7] for i in range(n + 1)]
    questions = (
        f"{person} comes on {days[0]} and leaves {COUNT_WORDS[n - 1]} days later. Which day is it?",
        f"It is {days[0]}. {person} comes in {COUNT_WORDS[n - 1]} days. Which day is it?",
    )
    steps = ", ".join(f"{i} {day}" for i, day in enumerate(days[1:], 1))
    return Turn(
        messages=_say(d.choice(questions)),
        reasoning=f"After {days[0]}: {steps}.",
        content=f"{person}'s day is {days[-1]}.",
        contains=[f"{days[-1]}."],
        tool_share=0.1,
        instant_share=0.0,
    )


def lookup(d: Draw) -> Turn:
    """A fact stands in the system message among others."""
    people = [d.person() for _ in range(d.choice((2, 3, 4)))]
    rooms = [d.number(100, 999) for _ in people]
    which = d.choice(range(len(people)))
    facts = ", ".join(f"{p} in {r}" for p, r in zip(people, rooms, strict=True))
    user = d.choice(("Where is {}?", "In which room is {}?")).format(people[which])
    return Turn(
        messages=[{"role": "system", "content": f"Rooms: {facts}."}, *_say(user)],
        reasoning=f"The list says: {people[which]} in {rooms[which]}.",
        content=f"{people[which]} is in room {rooms[which]}.",
        contains=[f"room {rooms[which]}."],
        tool_share=0.1,
    )


def echo(d: Draw) -> Turn:
    """Pure copying; a model that can do this has learned what arguments need."""
    kinds: tuple[Callable[[], str], ...] = (
        d.town,
        d.person,
        d.item,
        d.time,
        lambda: str(d.number(10, 999)),
    )
    values = [d.choice(kinds)() for _ in range(d.choice((3, 4, 5, 6, 7)))]
    text = ", ".join(values)
    return Turn(
        messages=_say(d.choice(("Repeat: {}.", "Say this again: {}.")).format(text)),
        reasoning=f"An echo of {len(values)} words.",
        content=text,
        contains=[text],
        tool_share=0.1,
    )


TALK_FAMILIES: dict[str, Callable[[Draw], Turn]] = {
    "arithmetic": arithmetic,
    "code": code,
    "lists": lists,
    "han_talk": han_talk,
    "emoji": emoji,
    "quoted_markers": quoted_markers,
    "greeting": greeting,
    "calendar": calendar,
    "lookup": lookup,
    "echo": echo,
}
