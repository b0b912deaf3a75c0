"""Instructions without people that ask for a skill: sorting, counting, arithmetic, extraction and so on.

Each kind has common wordings and reserved wordings. The student's training split contains only the common wordings and
the skills test set only the reserved wordings; the teacher's corpus contains both.
"""

from __future__ import annotations

from collections.abc import Callable

from llmdistill.embedded.dice import Dice
from llmdistill.embedded.rows import Row, Scope, choose_wording, with_article
from llmdistill.embedded.world import (
    COLOURS,
    DAYS,
    GOODS,
    GROUPS,
    MONTHS,
    NUMBERS,
    OPPOSITES,
    TOWNS,
)

WORDS = [word for group in GROUPS.values() for word in group]


def _list(words: list[str]) -> str:
    return f"Words: {', '.join(words)}."


def _and(words: list[str]) -> str:
    return ", ".join(words[:-1]) + f" and {words[-1]}"


def sort_words(dice: Dice, scope: Scope) -> Row:
    """Sort words alphabetically."""
    words = dice.sample(WORDS, 3)
    wording = choose_wording(
        dice,
        scope,
        ("Sort the words by the alphabet.", "Put these words in alphabetical order."),
        ("Arrange the list from A to Z.", "Order the words as a dictionary would."),
    )
    done = _and(sorted(words))
    return Row(wording, _list(words), (f"In order: {done}.", f"The order is {done}."))


def reverse(dice: Dice, scope: Scope) -> Row:
    """Reverse a list."""
    words = dice.sample(WORDS, 3)
    wording = choose_wording(
        dice,
        scope,
        ("Reverse the list.", "Write the list backwards."),
        ("Turn the order of the words around.", "Read the list from its end."),
    )
    done = _and(words[::-1])
    return Row(wording, _list(words), (f"Backwards: {done}.", f"The list backwards is {done}."))


def count(dice: Dice, scope: Scope) -> Row:
    """Count the things in a list, and those of them that belong to a group."""
    group = dice.pick(list(GROUPS))
    inside = dice.sample(GROUPS[group], dice.between(1, 3))
    outside = dice.sample([word for word in WORDS if word not in GROUPS[group]], dice.between(1, 2))
    words = dice.shuffled(inside + outside)
    wording = choose_wording(
        dice,
        scope,
        ("Count the {g} words.", "How many {g} words are in the list?"),
        ("Tell me the number of {g} words.", "Find every {g} word and count."),
    )
    found = [word for word in words if word in inside]
    number = ("one", "two", "three")[len(found) - 1]
    told, verb = (found[0], "is") if len(found) == 1 else (_and(found), "are")
    return Row(
        wording.format(g=group),
        _list(words),
        (f"The list has {told}. I count {number}.", f"There {verb} {told}. I count {number}."),
    )


def odd_one(dice: Dice, scope: Scope) -> Row:
    """The word that does not belong."""
    group, other = dice.sample(list(GROUPS), 2)
    odd = dice.pick(GROUPS[other])
    words = dice.shuffled([*dice.sample(GROUPS[group], 3), odd])
    wording = choose_wording(
        dice,
        scope,
        ("Which word does not belong?", "Find the odd one out."),
        ("One word is out of place. Name it.", "Which of these is unlike the others?"),
    )
    start = f"The word {odd} does not belong."
    return Row(
        wording,
        _list(words),
        (
            f"{start} It is {with_article(other)} word, not {with_article(group)} word.",
            f"{start} It is {with_article(other)} word.",
        ),
    )


def arithmetic(dice: Dice, scope: Scope) -> Row:
    """A sum or a difference of small numbers, with or without a story."""
    first, second = dice.between(3, 20), dice.between(2, 9)
    goods = dice.pick(GOODS)
    if dice.chance(0.5):
        wording = choose_wording(
            dice,
            scope,
            ("A box holds {a} {g} and I add {b}. How many are in it?", "What is {a} + {b}?"),
            ("There are {a} {g} on a table and {b} more arrive. Count them all.", "Add {b} to {a}."),
        )
        result, sign = first + second, "plus"
    else:
        first += second
        wording = choose_wording(
            dice,
            scope,
            ("A box holds {a} {g} and I take {b} out. How many are in it?", "What is {a} - {b}?"),
            ("There are {a} {g} on a table and {b} fall down. Count the rest.", "Subtract {b} from {a}."),
        )
        result, sign = first - second, "minus"
    one = f"The result is {result}."
    return Row(
        wording.format(a=first, b=second, g=goods),
        "",
        (f"{one} That is {first} {sign} {second}.", f"{first} {sign} {second} is {result}."),
    )


def classify(dice: Dice, scope: Scope) -> Row:
    """The groups of two words."""
    first, second = dice.sample(WORDS, 2)
    wording = choose_wording(
        dice,
        scope,
        ("Which kinds of thing are {a} and {b}?", "Sort {a} and {b} into groups."),
        ("Tell me what sort of word {a} is, and {b} too.", "A child asks what {a} and {b} are. Answer."),
    )
    groups = {word: name for name, group in GROUPS.items() for word in group}
    one, two = (f"{word} is {with_article(groups[word])} word" for word in (first, second))
    return Row(
        wording.format(a=first, b=second), "", (f"The word {one}. The word {two}.", f"The word {one} and {two}.")
    )


def following(dice: Dice, scope: Scope) -> Row:
    """The day or month before or after another."""
    circle, what = (DAYS, "day") if dice.chance(0.4) else (MONTHS, "month")
    place, step = dice.below(len(circle)), dice.pick((1, -1))
    word = "after" if step == 1 else "before"
    wording = choose_wording(
        dice,
        scope,
        ("Which {k} comes {w} {x}?", "Name the {k} {w} {x}."),
        ("What {k} do we have right {w} {x}?", "It is {x}. Tell me the {k} {w} it."),
    )
    given, found = circle[place], circle[(place + step) % len(circle)]
    return Row(
        wording.format(k=what, w=word, x=given),
        "",
        (f"The answer is {found}.", f"It is {found}."),
    )


def opposite(dice: Dice, scope: Scope) -> Row:
    """A sentence with its adjective replaced by the opposite."""
    adjective = dice.pick(list(OPPOSITES) + list(OPPOSITES.values()))
    turned = OPPOSITES.get(adjective) or next(key for key, value in OPPOSITES.items() if value == adjective)
    noun, colour = dice.pick(GROUPS["animal"] + GROUPS["tool"]), dice.pick(COLOURS)
    wording = choose_wording(
        dice,
        scope,
        ("Rewrite the sentence with the opposite of {x}.", "Replace {x} by its opposite."),
        ("Say the contrary of {x} and keep the rest.", "Change {x} to the word that means the reverse."),
    )
    # The answer does not repeat the given sentence, because MiniLLM's protocol forbids copies of six tokens.
    answers = (f"Now the {colour} {noun} was {turned}.", f"Now it was {turned}, the {colour} {noun}.")
    return Row(wording.format(x=adjective), f"The {colour} {noun} was {adjective}.", answers)


def extract(dice: Dice, scope: Scope) -> Row:
    """Extract the town, the day or the goods from a note."""
    town, day, goods, number = dice.pick(list(TOWNS)), dice.pick(DAYS), dice.pick(GOODS), dice.pick(NUMBERS)
    note = dice.pick(
        (
            f"The cart from {town} came on {day} with {number} {goods}.",
            f"{number.capitalize()} {goods} went to {town} by boat on {day}.",
            f"On {day} a trader in {town} sold {number} {goods}.",
        )
    )
    wording = choose_wording(
        dice,
        scope,
        ("Extract the {a} and the {b}.", "Which {a} and which {b} does the note name?"),
        ("Read the note and list its {a} and {b}.", "I need only the {a} and the {b} of this note."),
    )
    values = {"town": town, "day": day, "goods": f"{number} {goods}"}
    first, second = dice.sample(list(values), 2)
    told = {name: f"the {name} {'are' if name == 'goods' else 'is'} {value}" for name, value in values.items()}
    return Row(
        wording.format(a=first, b=second),
        note,
        (
            f"T{told[first][1:]} and {told[second]}.",
            f"{first.capitalize()}: {values[first]}. {second.capitalize()}: {values[second]}.",
        ),
    )


SKILL_KINDS: dict[str, Callable[[Dice, Scope], Row]] = {
    "sort_words": sort_words,
    "reverse": reverse,
    "count": count,
    "odd_one": odd_one,
    "arithmetic": arithmetic,
    "classify": classify,
    "following": following,
    "opposite": opposite,
    "extract": extract,
}
