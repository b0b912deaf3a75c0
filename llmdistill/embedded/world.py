"""An invented world: sixty people with eight facts each, and their towns, jobs, pets and dishes.

These facts exist nowhere else, so a model can learn them only from this corpus.
"""

from __future__ import annotations

from functools import cache

from llmdistill.embedded.dice import Dice


def words(text: str) -> list[str]:
    """The words of a text, split at blanks."""
    return text.split()


NAMES = words(
    "Alva Boran Cedra Dorin Elka Fenno Garla Hobin Ilsa Jorun Kelda Lumo Mirel Nadan Orla Pelko Quenna Rudo Sanja "
    "Tovik Ulma Varen Wenka Xandro Yelva Zorin Abrin Belka Cormo Delva Egon Farla Gunnar Hedda Ivo Jasna Korva Lisko "
    "Manda Nolle Osk Prina Rasko Silva Tamsin Urso Vesna Wilko Yorick Zelda Anouk Birko Calle Dunja Emmer Frida Gorm "
    "Hanno Imre Juna"
)

SEEN_NAMES = NAMES[::4]
"""The people in the student's training split; it never mentions the other people."""
UNSEEN_NAMES = [name for name in NAMES if name not in SEEN_NAMES]

TOWNS = {
    "Ostmar": ("on a lake", "a glass bridge"),
    "Lindel": ("in a forest", "a wooden tower"),
    "Karrow": ("on a hill", "a silver mine"),
    "Velby": ("by the sea", "a red lighthouse"),
    "Stonnet": ("in a valley", "an old mill"),
    "Marfield": ("on a plain", "a horse market"),
    "Duneck": ("by the desert", "a salt road"),
    "Porwick": ("on an island", "a fish harbour"),
    "Hallen": ("near a glacier", "an ice palace"),
    "Grimsel": ("in the mountains", "a stone gate"),
    "Tarvik": ("at a waterfall", "a floating garden"),
    "Eastmoor": ("beside a swamp", "a frog museum"),
}
"""Town -> where it lies, what it is known for."""

JOBS = {
    "baker": ("bakes bread and cakes", "an oven"),
    "potter": ("makes bowls and cups", "a wheel"),
    "smith": ("forges nails and gates", "an anvil"),
    "tailor": ("sews coats and shirts", "a needle"),
    "farmer": ("grows wheat and beets", "a plough"),
    "pilot": ("flies mail and guests", "a compass"),
    "nurse": ("cares for sick people", "a bandage"),
    "teacher": ("explains words and numbers", "a chalk board"),
    "painter": ("paints walls and doors", "a brush"),
    "miller": ("grinds corn and rye", "a mill stone"),
    "judge": ("settles quarrels and debts", "a law book"),
    "sailor": ("brings goods over the sea", "a sail"),
    "gardener": ("plants trees and roses", "a spade"),
    "dentist": ("repairs broken teeth", "a small mirror"),
    "printer": ("prints books and maps", "a press"),
}
"""Job -> what one does in it, and with which tool."""

PETS = {
    "goat": ("fresh hay", "a dry shed"),
    "cat": ("minced fish", "a soft basket"),
    "dog": ("long walks", "a strong leash"),
    "parrot": ("sunflower seeds", "a wide cage"),
    "rabbit": ("green clover", "a quiet hutch"),
    "turtle": ("clean water", "a warm lamp"),
    "horse": ("sweet oats", "a big meadow"),
    "duck": ("soaked grain", "a small pond"),
    "hamster": ("mixed nuts", "a running wheel"),
    "snake": ("frozen mice", "a heated tank"),
    "fox": ("raw eggs", "a deep den"),
    "owl": ("dark nights", "a hollow tree"),
}
"""Pet -> the two things it needs."""

DISHES = {
    "plum soup": ("boil the plums with honey", "stir in cream"),
    "bean stew": ("soak the beans overnight", "add smoked salt"),
    "fish pie": ("cover the fish with dough", "bake it slowly"),
    "nut bread": ("knead nuts into the dough", "let it rise twice"),
    "egg rice": ("fry the rice in butter", "crack two eggs over it"),
    "leek tart": ("slice the leeks thin", "melt cheese on top"),
    "lamb curry": ("brown the lamb in oil", "add ginger and milk"),
    "corn cakes": ("mash the corn with flour", "fry small cakes"),
    "beet salad": ("grate the beets", "mix in vinegar and dill"),
    "apple jam": ("cook the apples with sugar", "fill it into jars"),
    "onion broth": ("roast the onions", "pour hot water over them"),
    "mint tea": ("crush the mint leaves", "steep them for an hour"),
}
"""Dish -> the two steps to make it."""

HOBBIES = words("chess painting fishing dancing archery knitting sailing poetry juggling hiking singing carving")
COLOURS = words("red blue green yellow purple orange white black")
MONTHS = words("January February March April May June July August September October November December")
DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
NUMBERS = words("two three four five six seven eight nine")
GOODS = words("plums pears lamps ropes boxes spoons hats keys bells candles")
GROUPS = {
    "fruit": words("apple plum pear cherry grape lemon peach"),
    "animal": words("goat wolf duck mouse horse otter bear"),
    "tool": words("hammer saw spade needle anvil drill rake"),
    "metal": words("iron gold copper tin silver zinc lead"),
}
OPPOSITES = {
    "hot": "cold",
    "big": "small",
    "old": "young",
    "wet": "dry",
    "fast": "slow",
    "early": "late",
    "rich": "poor",
    "loud": "quiet",
    "clean": "dirty",
    "high": "low",
    "full": "empty",
    "hard": "soft",
}

ATTRIBUTES = ("home", "job", "pet", "food", "hobby", "age", "colour", "month")


@cache
def facts() -> dict[str, dict[str, str]]:
    """Name -> attribute -> value, for all people."""
    values = {
        "home": list(TOWNS),
        "job": list(JOBS),
        "pet": list(PETS),
        "food": list(DISHES),
        "hobby": HOBBIES,
        "age": [str(age) for age in range(20, 80)],
        "colour": COLOURS,
        "month": MONTHS,
    }
    return {name: {key: Dice(f"fact/{name}/{key}").pick(values[key]) for key in ATTRIBUTES} for name in NAMES}


@cache
def withheld() -> dict[str, tuple[str, ...]]:
    """Name of a seen person -> the three of eight attributes that the student's training split does not contain."""
    return {
        name: tuple(ATTRIBUTES[(index + shift) % len(ATTRIBUTES)] for shift in (0, 3, 5))
        for index, name in enumerate(SEEN_NAMES)
    }
