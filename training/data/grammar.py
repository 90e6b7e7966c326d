"""Made-up English lines that dictionaries lack: numbers, dates, times, money, phones, names, questions, single words.

Lines are in written form ("$4.50", "7:30 p.m."), as users type them; the teachers' front end reads them out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random


def read_words(path: Path) -> dict[str, list[str]]:
    """Lists of words by kind; a list goes on over indented lines."""
    kinds = path.read_text(encoding="utf-8").replace("\n  ", " ").splitlines()
    return {kind: words.strip().split(" | ") for kind, _, words in (line.partition(":") for line in kinds)}


WORDS = read_words(Path(__file__).with_name("words.txt"))


def pick(kind: str, rng: Random) -> str:
    return rng.choice(WORDS[kind])


def full_name(rng: Random) -> str:
    title = rng.choice(("", "", "", "Mr. ", "Mrs. ", "Ms. ", "Dr. "))
    return f"{title}{pick('first', rng)} {pick('last', rng)}"


def number(rng: Random) -> str:
    size = rng.random()
    if size < 0.4:
        return str(rng.randint(2, 99))
    if size < 0.65:
        return str(rng.randint(100, 999))
    if size < 0.85:
        return f"{rng.randint(1000, 999999):,}"
    return f"{rng.randint(0, 99)}.{rng.randint(1, 9)}"


def money(rng: Random) -> str:
    sign = rng.choice("$$$€£")
    return f"{sign}{rng.randint(1, 250)}.{rng.randint(1, 99):02d}" if rng.random() < 0.5 else f"{sign}{rng.randint(1, 9999):,}"


def clock(rng: Random) -> str:
    hour, minute = rng.randint(1, 12), rng.choice((0, 0, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 55, rng.randint(1, 59)))
    suffix = rng.choice((" a.m.", " p.m.", " AM", " PM", ""))
    return f"{hour}{suffix}" if minute == 0 and suffix else f"{hour}:{minute:02d}{suffix}"


def date(rng: Random) -> str:
    month, day, year = pick("month", rng), rng.randint(1, 28), rng.randint(1700, 2035)
    weekday = pick("day", rng)
    return rng.choice((f"{month} {day}, {year}", f"{month} {day}", f"{month} {year}", f"{weekday}, {month} {day}"))


def phone(rng: Random) -> str:
    return f"{rng.randint(200, 989)}-{rng.randint(200, 999)}-{rng.randint(0, 9999):04d}"


def count(rng: Random) -> str:
    return f"{number(rng)} {pick('unit', rng)}"


def place(rng: Random) -> str:
    where = pick("place", rng)
    return f"the {pick('adjective', rng)} {where}" if rng.random() < 0.5 else f"the {where}"


def thing(rng: Random) -> str:
    what = pick("thing", rng)
    return f"{pick('adjective', rng)} {what}" if rng.random() < 0.6 else what


def of_kind(kind: str) -> Callable[[Random], str]:
    return lambda rng: pick(kind, rng)


SLOTS: dict[str, Callable[[Random], str]] = {
    "name": full_name, "number": number, "money": money, "clock": clock, "date": date, "phone": phone, "count": count,
    "thing": thing, "place": place, **{kind: of_kind(kind) for kind in ("first", "day", "city", "role", "did")},
    "year": lambda rng: str(rng.randint(1700, 2035)), "digit": lambda rng: str(rng.randint(2, 9)),
    "ordinal": lambda rng: rng.choice(("first", "second", "3rd", "fourth", "5th", "10th", "last", "next")),
}  # fmt: skip
TEMPLATES = (
    "The meeting starts at {clock} on {day}.", "It was built in {year}.", "She was born on {date}.",
    "The total comes to {money}.", "That {thing} costs {money}.", "You can reach {first} at {phone}.",
    "My number is {phone}.", "Call {phone} before {clock}.", "{name} lives in {city}.", "{name} is a {role} from {city}.",
    "We walked {count} to {place}.", "It weighs about {count}.", "The train to {city} leaves at {clock}.",
    "Flight {number} to {city} is delayed until {clock}.", "Chapter {digit}, page {number}.", "Room {number} is free.",
    "{first} {did} a {thing} near {place}.", "{first} and {first} {did} the {thing} on {day}.",
    "Between {year} and {year}, nothing changed.", "In {year}, {name} moved to {city}.", "The {ordinal} {thing} was mine.",
    "Where is {place}?", "What time does {place} open?", "Is the {thing} still there, {first}?", "Who {did} my {thing}?",
    "How much is the {thing}?", "Did {first} really pay {money} for a {thing}?", "Can you meet me at {clock}?",
    "Why did {first} go to {city}?", "When was {name} born?", "Which {thing} do you want, the {ordinal} one?",
    "Have you seen the {thing}?", "Shall we say {clock} at {place}?", "Are you going to {city} on {day}?",
    "Wait for me at {place}!", "Don't forget the {thing}!", "What a {thing}!", "{first}, come here!",
    "Turn left after {count}.", "Only {number} of {number} answered.", "About {number} percent agreed.",
    "The temperature rose by {digit} degrees.", "Order number {number} has shipped.", "It opens on {date} at {clock}.",
    "\"I {did} it,\" said {first}.", "\"Where is my {thing}?\" asked {name}.", "{first} paid {money}; {first} paid {money}.",
    "Please bring {digit} of them, a {thing} and a {thing}.", "First the {thing}, then the {thing}, and finally the {thing}.",
    "Dear {name}, your {thing} is ready.", "The next stop is {place}.", "No, it was {first} who {did} the {thing}.",
    "If it rains on {day}, we will meet at {place} instead.", "I would rather have a {thing} than a {thing}.",
    "The score was {digit} to {digit}.", "They sold {number} of them for {money} each.", "He ran {count} in {count}.",
    "After {clock}, {place} is closed.", "There are {number} steps to {place}.", "We expect {number} guests by {clock}.",
)  # fmt: skip


def fill(template: str, rng: Random) -> str:
    """A template with every slot drawn afresh, its first letter in upper case."""
    out, rest = "", template
    while "{" in rest:
        before, _, tail = rest.partition("{")
        slot, _, rest = tail.partition("}")
        out += before + SLOTS[slot](rng)
    line = (out + rest).replace("..", ".")
    return line[0].upper() + line[1:]


def short_line(rng: Random) -> str:
    words = pick("word", rng) if rng.random() < 0.5 else pick("phrase", rng)
    return words + rng.choice((".", ".", ".", "!", "?"))


def made_lines(amount: int, seed: int = 7) -> Sequence[str]:
    """`amount` different lines, the same for the same seed."""
    rng = Random(seed)
    lines: dict[str, None] = {}
    while len(lines) < amount:
        lines[short_line(rng) if rng.random() < 0.06 else fill(rng.choice(TEMPLATES), rng)] = None
    return list(lines)
