"""The kinds of instruction in the corpus: about people, asking for a skill, and about towns, jobs, pets and dishes.

The instructions without people have common wordings and reserved wordings. The student's training split contains only
the common wordings and the skills test set only the reserved ones; the teacher's corpus contains both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from embedded_world.world import ATTRIBUTES, WORLD, Dice, facts
from llmdistill.data.examples import Example

INSTRUCTIONS: dict[str, dict[str, Any]] = WORLD["instructions"]
GROUPS: dict[str, list[str]] = WORLD["groups"]
WORDS = [word for group in GROUPS.values() for word in group]


@dataclass(frozen=True)
class Scope:
    """What a split may use: some facts of some people, and one or both lists of wordings."""

    people: Mapping[str, Sequence[str]]
    """Name -> the attributes that questions and answers may use."""
    wordings: Sequence[str] = ("wordings",)
    """The keys of the lists: `wordings` has the common ones, `reserved` the reserved ones."""


Kind = Callable[[Dice, Scope], Example]


def _wording(dice: Dice, scope: Scope, texts: Mapping[str, Any]) -> str:
    """A wording that the scope allows."""
    return dice.pick([wording for key in scope.wordings for wording in texts.get(key, [])])


def _filled(wording: str, context: str, answers: Sequence[str], values: Mapping[str, object]) -> Example:
    return Example(wording.format(**values), context.format(**values), tuple(each.format(**values) for each in answers))


def _row(
    dice: Dice, scope: Scope, texts: Mapping[str, Any], *, context: str = "", answers: str = "answers", **values: object
) -> Example:
    """A row from one of the wordings and all the answers, with the values filled in."""
    return _filled(_wording(dice, scope, texts), context, texts[answers], values)


def _with_article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def _noun(attribute: str) -> str:
    return WORLD["attributes"][attribute]["noun"]


def value_of(name: str, attribute: str) -> str:
    """Return the value of a fact as it stands in a sentence."""
    value = facts()[name][attribute]
    return _with_article(value) if attribute in ("job", "pet") else value


def _tell(name: str, attribute: str) -> str:
    return WORLD["attributes"][attribute]["predicate"].format(v=value_of(name, attribute))


def _some(dice: Dice, scope: Scope, count: int) -> tuple[str, list[str]]:
    """A person and some of the attributes."""
    name = dice.pick(list(scope.people))
    return name, dice.sample(scope.people[name], count)


def fact(dice: Dice, scope: Scope) -> Example:
    """One fact of one person."""
    name, (attribute,) = _some(dice, scope, 1)
    return _row(dice, scope, WORLD["attributes"][attribute], p=name, v=value_of(name, attribute))


def _several_facts(kind: str, count: int) -> Kind:
    """A kind about two or three facts of one person."""

    def make(dice: Dice, scope: Scope) -> Example:
        name, keys = _some(dice, scope, count)
        values = {"p": name}
        for noun, told, key in zip("abc", ("one", "two", "three"), keys, strict=False):
            values |= {noun: _noun(key), told: _tell(name, key)}
        return _row(dice, scope, INSTRUCTIONS[kind], **values)

    return make


two_facts = _several_facts("two_facts", 2)
profile = _several_facts("profile", 3)


def _two_people(dice: Dice, scope: Scope) -> tuple[str, str, list[str]]:
    first, second = dice.sample(list(scope.people), 2)
    shared = [key for key in ATTRIBUTES if key in scope.people[first] and key in scope.people[second]]
    return first, second, shared


def _both(first: str, second: str, key: str) -> dict[str, str]:
    """Two people, the noun of an attribute, and what is told about both."""
    return {"p": first, "q": second, "a": _noun(key), "one": _tell(first, key), "two": _tell(second, key)}


def older(dice: Dice, scope: Scope) -> Example:
    """Which of two people is older."""
    while True:
        first, second, shared = _two_people(dice, scope)
        ages = {name: int(facts()[name]["age"]) for name in (first, second)}
        if "age" in shared and ages[first] != ages[second]:
            break
    elder = max(first, second, key=lambda name: ages[name])
    return _row(dice, scope, INSTRUCTIONS["older"], elder=elder, **_both(first, second, "age"))


def same(dice: Dice, scope: Scope) -> Example:
    """Whether two people share a fact."""
    first, second, shared = _two_people(dice, scope)
    key = dice.pick([key for key in shared if key != "age"])
    answers = "answers" if facts()[first][key] == facts()[second][key] else "otherwise"
    return _row(dice, scope, INSTRUCTIONS["same"], answers=answers, **_both(first, second, key))


def which(dice: Dice, scope: Scope) -> Example:
    """Which of two people fits a statement."""
    while True:
        first, second, shared = _two_people(dice, scope)
        key = dice.pick(shared)
        if facts()[first][key] != facts()[second][key]:
            break
    right = dice.pick((first, second))
    return _row(dice, scope, INSTRUCTIONS["which"], v=facts()[right][key], right=right, **_both(first, second, key))


def check(dice: Dice, scope: Scope) -> Example:
    """A statement to confirm or to correct."""
    name, (key,) = _some(dice, scope, 1)
    true = facts()[name][key]
    claim = true if dice.chance(0.5) else facts()[dice.pick(list(scope.people))][key]
    answers = "answers" if claim == true else "otherwise"
    values = {"p": name, "a": _noun(key), "v": claim, "one": _tell(name, key)}
    return _row(dice, scope, INSTRUCTIONS["check"], answers=answers, **values)


def reading(dice: Dice, scope: Scope) -> Example:
    """A question about a passage in which people meet."""
    giver, taker = dice.sample(list(scope.people), 2)
    day, goods, count = dice.pick(WORLD["days"]), dice.pick(WORLD["goods"]), dice.pick(WORLD["numbers"])
    passage = dice.pick(WORLD["reading"]["passages"])
    question = dice.pick(WORLD["reading"]["questions"])
    values = {"p": giver, "q": taker, "day": day, "goods": goods, "count": count}
    return _filled(question["wording"], passage, question["answers"], values)


def _list(words: list[str]) -> str:
    return f"Words: {', '.join(words)}."


def _and(words: list[str]) -> str:
    return ", ".join(words[:-1]) + f" and {words[-1]}"


def sort_words(dice: Dice, scope: Scope) -> Example:
    """Sort words alphabetically."""
    words = dice.sample(WORDS, 3)
    return _row(dice, scope, INSTRUCTIONS["sort_words"], context=_list(words), done=_and(sorted(words)))


def reverse(dice: Dice, scope: Scope) -> Example:
    """Reverse a list."""
    words = dice.sample(WORDS, 3)
    return _row(dice, scope, INSTRUCTIONS["reverse"], context=_list(words), done=_and(words[::-1]))


def count(dice: Dice, scope: Scope) -> Example:
    """Count the things in a list that belong to a group."""
    group = dice.pick(list(GROUPS))
    inside = dice.sample(GROUPS[group], dice.between(1, 3))
    outside = dice.sample([word for word in WORDS if word not in GROUPS[group]], dice.between(1, 2))
    words = dice.shuffled(inside + outside)
    found = [word for word in words if word in inside]
    values = {
        "g": group,
        "number": ("one", "two", "three")[len(found) - 1],
        "found": found[0] if len(found) == 1 else _and(found),
        "verb": "is" if len(found) == 1 else "are",
    }
    return _row(dice, scope, INSTRUCTIONS["count"], context=_list(words), **values)


def odd_one(dice: Dice, scope: Scope) -> Example:
    """The word that does not belong."""
    group, other = dice.sample(list(GROUPS), 2)
    odd = dice.pick(GROUPS[other])
    words = dice.shuffled([*dice.sample(GROUPS[group], 3), odd])
    values = {"odd": odd, "other": _with_article(other), "group": _with_article(group)}
    return _row(dice, scope, INSTRUCTIONS["odd_one"], context=_list(words), **values)


def arithmetic(dice: Dice, scope: Scope) -> Example:
    """A sum or a difference of small numbers, with or without a story."""
    first, second = dice.between(3, 20), dice.between(2, 9)
    goods = dice.pick(WORLD["goods"])
    if dice.chance(0.5):
        return _row(dice, scope, INSTRUCTIONS["sum"], a=first, b=second, g=goods, result=first + second)
    return _row(dice, scope, INSTRUCTIONS["difference"], a=first + second, b=second, g=goods, result=first)


def classify(dice: Dice, scope: Scope) -> Example:
    """The groups of two words."""
    first, second = dice.sample(WORDS, 2)
    groups = {word: _with_article(name) for name, group in GROUPS.items() for word in group}
    return _row(dice, scope, INSTRUCTIONS["classify"], a=first, b=second, one=groups[first], two=groups[second])


def following(dice: Dice, scope: Scope) -> Example:
    """The day or month before or after another."""
    what = "day" if dice.chance(0.4) else "month"
    circle = WORLD[f"{what}s"]
    place, step = dice.below(len(circle)), dice.pick((1, -1))
    found = circle[(place + step) % len(circle)]
    values = {"k": what, "w": "after" if step == 1 else "before", "x": circle[place], "found": found}
    return _row(dice, scope, INSTRUCTIONS["following"], **values)


def opposite(dice: Dice, scope: Scope) -> Example:
    """A sentence with its adjective replaced by the opposite."""
    opposites = WORLD["opposites"] | {value: key for key, value in WORLD["opposites"].items()}
    adjective = dice.pick(list(opposites))
    noun, colour = dice.pick(GROUPS["animal"] + GROUPS["tool"]), dice.pick(WORLD["colours"])
    texts = INSTRUCTIONS["opposite"]
    values = {"x": adjective, "turned": opposites[adjective], "noun": noun, "colour": colour}
    return _row(dice, scope, texts, context=texts["context"], **values)


def extract(dice: Dice, scope: Scope) -> Example:
    """Extract the town, the day or the goods from a note."""
    texts = INSTRUCTIONS["extract"]
    town, day = dice.pick(list(WORLD["towns"])), dice.pick(WORLD["days"])
    goods, number = dice.pick(WORLD["goods"]), dice.pick(WORLD["numbers"])
    note, wording = dice.pick(texts["notes"]), _wording(dice, scope, texts)
    found = {"town": town, "day": day, "goods": f"{number} {goods}"}
    a, b = dice.sample(list(found), 2)
    one, two = (f"{'are' if name == 'goods' else 'is'} {found[name]}" for name in (a, b))
    values = {"town": town, "day": day, "goods": goods, "number": number, "Number": number.capitalize()}
    values |= {"a": a, "b": b, "A": a.capitalize(), "B": b.capitalize()}
    values |= {"one": one, "two": two, "first": found[a], "second": found[b]}
    return _filled(wording, note, texts["answers"], values)


def _topic(kind: str, things: str) -> Kind:
    """A kind that asks about one of the things, each of which has two properties."""

    def make(dice: Dice, scope: Scope) -> Example:
        thing = dice.pick(list(WORLD[things]))
        one, two = WORLD[things][thing]
        name = _with_article(thing) if things in ("jobs", "pets") else thing
        return _row(dice, scope, INSTRUCTIONS[kind], x=name, X=name.capitalize(), y=thing, one=one, two=two)

    return make


PEOPLE_KINDS: dict[Kind, int] = {fact: 5, two_facts: 3, profile: 3, older: 2, same: 2, which: 2, check: 2, reading: 2}
"""The kinds about people, and their relative frequencies."""
SKILL_KINDS: list[Kind] = [sort_words, reverse, count, odd_one, arithmetic, classify, following, opposite, extract]
TOPIC_KINDS = [_topic("care", "pets"), _topic("recipe", "dishes"), _topic("travel", "towns"), _topic("career", "jobs")]
"""How to keep an animal, how to make a dish, what to see in a town, and what one does in a job."""
