"""Checks a DeepSpeed configuration by DeepSpeed's own reader, so that its keys and types are not listed again here."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

from llmdistill.config.strict import nearest
from llmdistill.errors import UserError

_WITHOUT_DEFAULT: dict[str, type] = {"steps_per_print": int}
"""Types of keys whose default in DeepSpeed is None."""
_OF_ENGINE = {"sequence_parallel_size", "vocabulary_size"}
"""Keys that DeepSpeed reads in some environments only."""
_OF_ADAM = {"torch_adam", "adam_w_mode", "fp32_optimizer_states"}
"""Parameters of Adam and AdamW that DeepSpeed removes before it makes the optimizer."""


def check_ds_config(resolved: dict[str, Any], path: str) -> None:
    """Raise a UserError if DeepSpeed does not know a key of a resolved configuration, at any depth, or refuses a value.

    DeepSpeed ignores unknown keys at some depths, and finds some errors only when it makes the optimizer, after the
    teacher is scored. This function loads DeepSpeed.
    """
    with _quiet():
        from deepspeed.runtime.config import DeepSpeedConfig

        # DeepSpeed computes the whole batch from its parts; the ranks may not have joined yet.
        watched = _Watched({key: value for key, value in resolved.items() if key != "train_batch_size"}, path)
        with _refusals(path, watched):
            DeepSpeedConfig(watched)
    unread = next(watched.unread(), None)
    if unread is not None:
        key, known = unread
        raise _unknown(path, key, known)
    _check_optimizer(resolved["optimizer"], path)


def check_zero(settings: dict[str, Any], where: str) -> None:
    """Raise a UserError if DeepSpeed does not know a key of zero_optimization, or refuses its value; see above."""
    with _quiet():
        from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

        with _refusals(where, None):
            DeepSpeedZeroConfig(**settings)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide what DeepSpeed logs: it writes to stdout, also when it is imported."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


class _Watched(dict[str, Any]):
    """A block of a configuration that notes which of its keys are read, and which was read last.

    A value must have the type of the default that its reader gives, which DeepSpeed does not check for plain keys.
    """

    def __init__(self, block: dict[str, Any], path: str, prefix: str = "", root: _Watched | None = None) -> None:
        self.path, self.prefix, self.root = path, prefix, self if root is None else root
        self.asked: set[str] = set()
        self.whole = False
        """Whether a class of DeepSpeed has taken the block as a whole: then it checks the keys itself."""
        self.last = self.place = ""
        """Of the root: the last of its own keys that was read, and the block that was then taken as a whole."""
        blocks = {
            key: _Watched(v, path, f"{prefix}{key}.", self.root) for key, v in block.items() if isinstance(v, dict)
        }
        super().__init__({**block, **blocks})

    def _note(self, key: object) -> None:
        self.asked.add(str(key))
        if self.root is self:
            self.last, self.place = str(key), ""

    def __copy__(self) -> _Watched:
        return self

    def __contains__(self, key: object) -> bool:
        self._note(key)
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self._note(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value, and check it by the type of the reader's default."""
        self._note(key)
        if not super().__contains__(key):
            return default
        value = super().__getitem__(key)
        kind = _WITHOUT_DEFAULT.get(key, type(default))
        if kind in _KINDS and not (isinstance(value, _KINDS[kind]) and isinstance(value, bool) == (kind is bool)):
            raise _refused(self.path, f"{self.prefix}{key}", value, f"expected {_NAMES[kind]}")
        return value

    def __iter__(self) -> Iterator[str]:
        self.whole, self.root.place = True, self.prefix
        return super().__iter__()

    def keys(self) -> Any:
        """Return the block itself, so that a look at one key and a walk over all keys are told apart."""
        return self

    def items(self) -> Any:
        """Return keys and values; the block is taken as a whole."""
        return [(key, dict.__getitem__(self, key)) for key in self]

    def unread(self) -> Iterator[tuple[str, list[str]]]:
        """Yield the keys that nothing has read, with all that were asked for beside them."""
        if self.whole or (not self.asked and self.root is not self):  # a class has taken it, or the one around it has
            return
        if self.prefix == "optimizer.params.":  # see _check_optimizer
            return
        for key, value in dict.items(self):
            name = f"{self.prefix}{key}"
            if key not in self.asked and name not in _OF_ENGINE:
                yield name, [f"{self.prefix}{each}" for each in sorted(self.asked)]
            elif isinstance(value, _Watched):
                yield from value.unread()


_KINDS: dict[type, tuple[type, ...]] = {
    bool: (bool,),
    int: (int, float),
    float: (int, float),
    str: (str,),
    dict: (dict,),
}
_NAMES = {bool: "true or false", int: "a number", float: "a number", str: "a text", dict: "a block"}


@contextmanager
def _refusals(path: str, watched: _Watched | None) -> Iterator[None]:
    """Turn what DeepSpeed's reader raises into one sentence."""
    from pydantic import ValidationError

    try:
        yield
    except UserError:
        raise
    except ValidationError as error:
        wrong = error.errors()[0]
        prefix = "" if watched is None else watched.place
        key = prefix + ".".join(map(str, wrong["loc"]))
        if wrong["type"] == "extra_forbidden":
            raise _unknown(path, key, [f"{prefix}{each}" for each in _fields(error.title, wrong["loc"])]) from error
        raise _refused(path, key, wrong["input"], wrong["msg"][:1].lower() + wrong["msg"][1:]) from error
    except Exception as error:  # its own checks raise several types, assertions among them
        said = " ".join(str(error).split()) or type(error).__name__
        if watched is not None and dict.__contains__(watched, watched.last):
            raise _refused(path, watched.last, dict.__getitem__(watched, watched.last), said) from error
        raise UserError(f"{path}: DeepSpeed refuses the configuration ({said}); fix or remove the key") from error


def _fields(title: str, place: tuple[int | str, ...]) -> list[str]:
    """Return the keys that a class of DeepSpeed knows at a place, with those before them."""
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    models, found = [DeepSpeedConfigModel], dict[str, Any]()
    for model in models:
        models += model.__subclasses__()
        found[model.__name__] = model
    model = found.get(title)
    for name in place[:-1]:
        field = None if model is None else _named(model).get(str(name))
        model = next((each for each in found.values() if field is not None and each.__name__ in str(field)), None)
    parents = "".join(f"{name}." for name in place[:-1])
    return [] if model is None else [f"{parents}{name}" for name in _named(model)]


def _named(model: Any) -> dict[str, Any]:
    return {field.alias or name: field.annotation for name, field in model.model_fields.items()}


def _check_optimizer(optimizer: dict[str, Any], path: str) -> None:
    """Raise a UserError if there is no such optimizer, or it does not take a parameter."""
    kind, params = optimizer["type"], optimizer["params"]
    known = _optimizers()
    name = str(kind) if str(kind) in known else str(kind).lower()
    if name not in known:
        hint = nearest(str(kind), known).partition("; --help")[0]
        raise UserError(f"{path}: optimizer.type is {kind!r}, which DeepSpeed does not have{hint}; take AdamW")
    classes = known[name][:1] if params.get("torch_adam") else known[name]
    if not classes:
        return
    taken = set().union(*(signature(each).parameters for each in classes))
    taken |= _OF_ADAM if known[name] is known["adam"] else set()
    unknown = next((each for each in params if each not in taken), None)
    if unknown is not None:
        listed = ", ".join(sorted(taken - {"params", "model_params"}))
        raise UserError(
            f"{path}: optimizer.params.{unknown}: {kind} has no such parameter, only {listed}; remove it, or take AdamW"
        )


def _optimizers() -> dict[str, list[Any]]:
    """Return the optimizers by name: DeepSpeed's in small letters, of which it takes one by the device, and torch's.

    Some of DeepSpeed's have no class that could be asked for its parameters.
    """
    import torch
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

    adams = [torch.optim.AdamW, DeepSpeedCPUAdam, FusedAdam]
    own: dict[str, list[Any]] = {
        **{"adam": adams, "adamw": adams, "lamb": [FusedLamb], "lion": [FusedLion, DeepSpeedCPULion]},
        "adagrad": [torch.optim.Adagrad, DeepSpeedCPUAdagrad],
    }
    of_torch = {name: [each] for name, each in vars(torch.optim).items() if isinstance(each, type)}
    return {**of_torch, "Adam": adams, "AdamW": adams, **{name: [] for name in DEEPSPEED_OPTIMIZERS}, **own}


def _unknown(path: str, key: str, known: list[str]) -> UserError:
    hint = nearest(key, known).replace("; --help lists them all", "")
    return UserError(f"{path}: {key}: DeepSpeed has no such setting{hint}; fix or remove it")


def _refused(path: str, key: str, value: object, why: str) -> UserError:
    return UserError(f"{path}: {key} is {_shown(value)}: DeepSpeed refuses it ({why}); fix or remove it")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
