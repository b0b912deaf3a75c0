"""Instructions about the people of the invented world: facts, profiles, comparisons, checks, reading."""

from __future__ import annotations

from collections.abc import Callable

from llmdistill.embedded.dice import Dice
from llmdistill.embedded.rows import Row, Scope, with_article
from llmdistill.embedded.world import ATTRIBUTES, DAYS, GOODS, NUMBERS, facts

QUESTIONS = {
    "home": (
        "Where does {p} live?",
        "Which town does {p} live in?",
        "Name the home town of {p}.",
        "In which town would I visit {p}?",
    ),
    "job": (
        "What is the job of {p}?",
        "What does {p} do for a living?",
        "Name the job of {p}.",
        "How does {p} earn money?",
    ),
    "pet": ("Which pet does {p} have?", "What animal lives with {p}?", "Name the pet of {p}.", "Does {p} have a pet?"),
    "food": (
        "What does {p} like to eat?",
        "What is the favourite dish of {p}?",
        "Name the favourite dish of {p}.",
        "What should I cook for {p}?",
    ),
    "hobby": (
        "What is the hobby of {p}?",
        "How does {p} spend a free day?",
        "Name the hobby of {p}.",
        "What does {p} do for fun?",
    ),
    "age": ("How old is {p}?", "What is the age of {p}?", "Name the age of {p}.", "How many years old is {p}?"),
    "colour": (
        "Which colour does {p} like?",
        "What is the favourite colour of {p}?",
        "Name the favourite colour of {p}.",
        "In which colour should I paint the door of {p}?",
    ),
    "month": (
        "When was {p} born?",
        "In which month is the birthday of {p}?",
        "Name the birth month of {p}.",
        "When should I send {p} a birthday card?",
    ),
}
ANSWERS = {
    "home": ("{p} lives in {v}.", "The home of {p} is {v}."),
    "job": ("{p} works as {v}.", "{p} is {v}."),
    "pet": ("{p} has {v}.", "The pet of {p} is {v}."),
    "food": ("{p} likes {v}.", "The favourite dish of {p} is {v}."),
    "hobby": ("{p} enjoys {v}.", "The hobby of {p} is {v}."),
    "age": ("{p} is aged {v}.", "The age of {p} is {v}."),
    "colour": ("{p} prefers {v}.", "The favourite colour of {p} is {v}."),
    "month": ("{p} was born in {v}.", "The birthday of {p} is in {v}."),
}
PREDICATES = {
    "home": "lives in {v}",
    "job": "works as {v}",
    "pet": "has {v}",
    "food": "likes {v}",
    "hobby": "enjoys {v}",
    "age": "is aged {v}",
    "colour": "prefers {v}",
    "month": "was born in {v}",
}
NOUNS = {
    "home": "home",
    "job": "job",
    "pet": "pet",
    "food": "favourite dish",
    "hobby": "hobby",
    "age": "age",
    "colour": "favourite colour",
    "month": "birth month",
}


def _spoken(attribute: str, value: str) -> str:
    return with_article(value) if attribute in ("job", "pet") else value


def _tell(name: str, attribute: str) -> str:
    return PREDICATES[attribute].format(v=_spoken(attribute, facts()[name][attribute]))


def _some(dice: Dice, scope: Scope, count: int) -> tuple[str, list[str]]:
    name = dice.pick(scope.names)
    return name, dice.sample(scope.attributes[name], count)


def fact(dice: Dice, scope: Scope) -> Row:
    """One fact of one person."""
    name, (attribute,) = _some(dice, scope, 1)
    question = dice.pick(QUESTIONS[attribute]).format(p=name)
    value = _spoken(attribute, facts()[name][attribute])
    return Row(question, "", tuple(answer.format(p=name, v=value) for answer in ANSWERS[attribute]))


def two_facts(dice: Dice, scope: Scope) -> Row:
    """Two facts of one person in one sentence or two."""
    name, (first, second) = _some(dice, scope, 2)
    wording = dice.pick(
        ("Tell me the {a} and the {b} of {p}.", "What are the {a} and the {b} of {p}?", "Give the {a} and {b} of {p}.")
    )
    one, two = _tell(name, first), _tell(name, second)
    return Row(
        wording.format(a=NOUNS[first], b=NOUNS[second], p=name),
        "",
        (f"{name} {one} and {two}.", f"{name} {one}. {name} {two}."),
    )


def profile(dice: Dice, scope: Scope) -> Row:
    """Three facts of one person, listed in the instruction, in two sentences."""
    name, (first, second, third) = _some(dice, scope, 3)
    wording = dice.pick(
        (
            "Write two sentences about {p}. Mention the {a}, the {b} and the {c}.",
            "Describe {p} by {a}, {b} and {c}.",
            "Introduce {p} to a guest. Say something on {a}, {b} and {c}.",
        )
    )
    one, two, three = (_tell(name, key) for key in (first, second, third))
    return Row(
        wording.format(p=name, a=NOUNS[first], b=NOUNS[second], c=NOUNS[third]),
        "",
        (f"{name} {one} and {two}. {name} also {three}.", f"{name} {one}, {two} and {three}."),
    )


def _two_people(dice: Dice, scope: Scope) -> tuple[str, str, list[str]]:
    first, second = dice.sample(scope.names, 2)
    shared = [key for key in ATTRIBUTES if key in scope.attributes[first] and key in scope.attributes[second]]
    return first, second, shared


def older(dice: Dice, scope: Scope) -> Row:
    """Which of two people is older."""
    while True:
        first, second, shared = _two_people(dice, scope)
        ages = {name: int(facts()[name]["age"]) for name in (first, second)}
        if "age" in shared and ages[first] != ages[second]:
            break
    wording = dice.pick(("Who is older, {p} or {q}?", "Compare the ages of {p} and {q}.", "Is {p} older than {q}?"))
    elder = max(first, second, key=lambda name: ages[name])
    told = f"{first} is aged {ages[first]} and {second} is aged {ages[second]}."
    return Row(wording.format(p=first, q=second), "", (f"{told} So {elder} is older.", f"{told} {elder} is older."))


def same(dice: Dice, scope: Scope) -> Row:
    """Whether two people share a fact."""
    first, second, shared = _two_people(dice, scope)
    attribute = dice.pick([key for key in shared if key != "age"])
    wording = dice.pick(("Do {p} and {q} have the same {a}?", "Compare {p} and {q} by {a}."))
    equal = facts()[first][attribute] == facts()[second][attribute]
    told = f"{first} {_tell(first, attribute)} and {second} {_tell(second, attribute)}."
    ends = ("They are the same.", "So it is the same.") if equal else ("They differ.", "So they differ.")
    return Row(wording.format(p=first, q=second, a=NOUNS[attribute]), "", tuple(f"{told} {end}" for end in ends))


def which(dice: Dice, scope: Scope) -> Row:
    """Which of two people fits a statement."""
    while True:
        first, second, shared = _two_people(dice, scope)
        attribute = dice.pick(shared)
        if facts()[first][attribute] != facts()[second][attribute]:
            break
    right = dice.pick((first, second))
    wording = dice.pick(("Whose {a} is {v}, {p} or {q}?", "Is {v} the {a} of {p} or of {q}?"))
    told = f"{first} {_tell(first, attribute)} and {second} {_tell(second, attribute)}."
    return Row(
        wording.format(a=NOUNS[attribute], v=facts()[right][attribute], p=first, q=second),
        "",
        (f"{told} So it is {right}.", f"{told} It is {right}."),
    )


def check(dice: Dice, scope: Scope) -> Row:
    """A statement to confirm or to correct."""
    name, (attribute,) = _some(dice, scope, 1)
    true = facts()[name][attribute]
    claim = true if dice.chance(0.5) else facts()[dice.pick(scope.names)][attribute]
    wording = dice.pick(
        (
            "True or false: the {a} of {p} is {v}.",
            "Is it right that the {a} of {p} is {v}?",
            "Check this claim: the {a} of {p} is {v}.",
        )
    )
    told = f"{name} {_tell(name, attribute)}."
    ends = ("So the claim is true.", "That is true.") if claim == true else ("So the claim is false.", "That is false.")
    return Row(wording.format(a=NOUNS[attribute], p=name, v=claim), "", tuple(f"{told} {end}" for end in ends))


def reading(dice: Dice, scope: Scope) -> Row:
    """A question about a passage in which people meet."""
    giver, taker = dice.sample(scope.names, 2)
    day, goods, count = dice.pick(DAYS), dice.pick(GOODS), dice.pick(NUMBERS)
    passage = dice.pick(
        (
            f"On {day} {giver} bought {count} {goods} and gave them to {taker}.",
            f"{giver} met {taker} on {day}. {taker} got {count} {goods} from {giver}.",
        )
    )
    question, answers = dice.pick(
        (
            ("When did this happen?", (f"It happened on {day}.", f"This was on {day}.")),
            (f"What did {taker} get?", (f"{taker} got {count} {goods}.", f"It was {count} {goods} from {giver}.")),
            (f"Who gave something to {taker}?", (f"{giver} gave {count} {goods} to {taker}.", f"It was {giver}.")),
            (f"How many {goods} changed hands?", (f"There were {count} {goods}.", f"It was {count}.")),
            (
                "Summarise the text.",
                (f"{giver} gave {goods} to {taker} on {day}.", f"{taker} got {goods} from {giver} on {day}."),
            ),
        )
    )
    return Row(question, passage, answers)


PEOPLE_KINDS: dict[str, Callable[[Dice, Scope], Row]] = {
    "fact": fact,
    "two_facts": two_facts,
    "profile": profile,
    "older": older,
    "same": same,
    "which": which,
    "check": check,
    "reading": reading,
}
