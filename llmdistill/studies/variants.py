"""The variants of a comparison: methods by name, tables of methods (suites/*.yaml), and starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from llmdistill.config.strict import did_you_mean
from llmdistill.errors import UserError
from llmdistill.methods import METHODS, MethodEntry
from llmdistill.report.paper import read_table, table_files, table_names

_FORMER = {"table3": "makd-table3-decoder", "table4": "makd-table4-decoder", "table5": "makd-table5"}
"""The former names of tables, which still work."""

_Entry = TypeVar("_Entry")


@dataclass(frozen=True)
class Start:
    """A way to make the untrained student from the teacher: changes to the recipe's settings, by dotted key."""

    name: str
    label: str
    settings: Mapping[str, Any]

    def key(self, name: str) -> str:
        """Return the name of a row from this start, which is the name itself for the recipe's own start."""
        return f"{name}-{self.name}" if self.name else name

    def title(self, label: str) -> str:
        """Return the title of a row from this start, such as `MaKD from loss`."""
        return f"{label} from {self.name}" if self.name else label


def _start(name: str, label: str, weighting: str, allocation: str) -> Start:
    factorize: dict[str, Any] = {"weighting": weighting, "allocation": allocation}
    if weighting == "none":
        factorize["calibration.data"] = None  # nothing is measured on them
    return Start(name, label, {f"student.factorize.{key}": value for key, value in factorize.items()})


START_OF_RECIPE = Start("", "as the recipe says", {})
STARTS = {
    start.name: start
    for start in (
        _start("plain", "plain SVD, one rank", "none", "uniform"),
        _start("activations", "weighted by activations, one rank", "activations", "uniform"),
        _start("gradients", "weighted by gradients, one rank", "gradients", "uniform"),
        _start("loss", "weighted by gradients, ranks by predicted loss", "gradients", "loss"),
    )
}


@dataclass(frozen=True)
class Variant:
    """A way to train the student: changed settings, and a grid to choose from on the validation set, by dotted key."""

    name: str
    label: str
    settings: Mapping[str, Any]
    grid: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    start: Start = START_OF_RECIPE

    @property
    def key(self) -> str:
        return self.start.key(self.name)

    @property
    def title(self) -> str:
        return self.start.title(self.label)

    @property
    def method(self) -> MethodEntry:
        return METHODS[self.settings["method"]]


@dataclass(frozen=True)
class MethodTable:
    """Methods that a comparison of decoders trains; `--suite` names it. Tables of encoders are `PublishedTable`."""

    title: str
    variants: list[Variant]
    paper: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)
    """The scores in the paper: {model type of the teacher: {row: {set: ROUGE-L}}}."""


def method_table_names() -> list[str]:
    """Return the names of the tables of decoders; those of encoders are `table_names`."""
    return table_files("methods")


def method_names() -> list[str]:
    return list(_known())


def load_method_table(name: str) -> MethodTable:
    """Load a table of decoders; raises UserError if there is none with this name."""
    name = _FORMER.get(name, name)
    if name not in method_table_names():
        every = [*method_table_names(), *table_names()]
        raise UserError(
            f"--suite {name}: there is no such suite{did_you_mean(name, every)} (there are {', '.join(every)})"
        )
    content = read_table(name)
    listed = content["methods"]
    if isinstance(listed, dict):
        listed = [{"name": key, **settings} for key, settings in listed.items()]
    variants = [Variant(**entry) if isinstance(entry, dict) else _known()[entry] for entry in listed]
    return MethodTable(content["title"], variants, content.get("paper", {}))


def load_methods(names: Sequence[str]) -> list[Variant]:
    """Return methods in the order of their names; UserError for a name that is unknown or there twice, or for none."""
    return _named(names, _known(), "--methods", "method")


def load_starts(names: Sequence[str]) -> list[Start]:
    """Return starts as `load_methods` returns methods."""
    return _named(names, STARTS, "--starts", "start")


def from_starts(variants: Sequence[Variant], starts: Sequence[Start]) -> list[Variant]:
    """Return every variant from every start, the variants of a start side by side."""
    return [replace(variant, start=start) for start in starts for variant in variants]


def _named(names: Sequence[str], known: Mapping[str, _Entry], key: str, what: str) -> list[_Entry]:
    for index, name in enumerate(names):
        if name not in known:
            raise UserError(
                f"{key}: there is no {what} {name!r}{did_you_mean(name, known)} (there are {', '.join(known)})"
            )
        if name in names[:index]:
            raise UserError(f"{key}: {name} is there twice; name it once")
    if not names:
        raise UserError(f"{key} names none; there are {', '.join(known)}")
    return [known[name] for name in names]


def _known() -> dict[str, Variant]:
    variants = []
    for name, method in METHODS.items():
        variants.append(Variant(name, method.label, {"method": name}, method.grid))
        for preset_name, preset in method.presets.items():
            grid = method.grid if preset.grid is None else preset.grid
            variants.append(Variant(preset_name, preset.label, {"method": name, **preset.settings}, grid))
    return {variant.name: variant for variant in variants}
