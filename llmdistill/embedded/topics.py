"""Instructions without people that ask about the animals, dishes, towns and jobs of the invented world."""

from __future__ import annotations

from collections.abc import Callable

from llmdistill.embedded.dice import Dice
from llmdistill.embedded.rows import Row, Scope, choose_wording, with_article
from llmdistill.embedded.world import DISHES, JOBS, PETS, TOWNS


def care(dice: Dice, scope: Scope) -> Row:
    """How to keep an animal well."""
    animal = dice.pick(list(PETS))
    food, place = PETS[animal]
    wording = choose_wording(
        dice,
        scope,
        (
            "How do I look after {x}?",
            "What does {x} need?",
            "Give advice on keeping {x}.",
            "Name two things for {x}.",
            "Explain how one cares for {x}.",
        ),
        (
            "My {y} is sad. What can I do for it?",
            "I am going to buy {x}. What should I prepare?",
            "A friend got {x} as a present. Help my friend.",
        ),
    )
    return Row(
        wording.format(x=with_article(animal), y=animal),
        "",
        (
            f"{with_article(animal).capitalize()} needs {food} and {place}.",
            f"Give the {animal} {food}. It also needs {place}.",
        ),
    )


def recipe(dice: Dice, scope: Scope) -> Row:
    """How to make a dish."""
    dish = dice.pick(list(DISHES))
    first, second = DISHES[dish]
    wording = choose_wording(
        dice,
        scope,
        (
            "How do I make {x}?",
            "Write a short recipe for {x}.",
            "Explain the steps of {x}.",
            "How is {x} cooked?",
            "Give me the recipe of {x}.",
        ),
        (
            "Guests want {x} tonight. Teach me to prepare it.",
            "What happens in the kitchen when {x} is made?",
            "I have never made {x} before. Where do I begin?",
        ),
    )
    return Row(
        wording.format(x=dish),
        "",
        (f"First {first}. Then {second}.", f"For {dish} you {first} and {second}."),
    )


def travel(dice: Dice, scope: Scope) -> Row:
    """What to see in a town."""
    town = dice.pick(list(TOWNS))
    place, sight = TOWNS[town]
    wording = choose_wording(
        dice,
        scope,
        (
            "What is {x} known for?",
            "Describe the town of {x}.",
            "Why should I visit {x}?",
            "What can one see in {x}?",
            "Where is {x}, and what is there?",
        ),
        (
            "Plan a short trip to {x} for me.",
            "Write one line for a travel guide to {x}.",
            "We have a day in {x}. How shall we spend it?",
        ),
    )
    return Row(
        wording.format(x=town),
        "",
        (f"{town} lies {place} and is known for {sight}.", f"{town} lies {place}. Visit {sight} there."),
    )


def career(dice: Dice, scope: Scope) -> Row:
    """What one does in a job, and with which tool."""
    job = dice.pick(list(JOBS))
    work, tool = JOBS[job]
    wording = choose_wording(
        dice,
        scope,
        (
            "What does {x} do?",
            "Explain the work of {x}.",
            "Which tool does {x} use, and for what?",
            "What is the task of {x}?",
            "Describe {x} at work.",
        ),
        (
            "I want to become {x}. What awaits me?",
            "Tell a child about the day of {x}.",
            "Our village is looking for {x}. Write what the work is.",
        ),
    )
    return Row(
        wording.format(x=with_article(job)),
        "",
        (
            f"{with_article(job).capitalize()} {work} and uses {tool}.",
            f"{with_article(job).capitalize()} {work}. The tool is {tool}.",
        ),
    )


TOPIC_KINDS: dict[str, Callable[[Dice, Scope], Row]] = {
    "care": care,
    "recipe": recipe,
    "travel": travel,
    "career": career,
}
