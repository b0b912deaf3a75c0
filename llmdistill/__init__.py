"""Compress language models by factorization and distillation.

    import llmdistill

    student = llmdistill.compress(teacher, rank=48)
    try:
        result = llmdistill.distill(teacher, student, rows, method="makd", steps=200)
    except llmdistill.UserError as error:
        print(error)  # one sentence: what is wrong, the value, and the remedy
    print(llmdistill.evaluate(result.student, rows, limit=2)["rougeL"])
    print(result.history[-1]["loss"], result.folder / "student")  # the student with its tokenizer

A teacher is a model of transformers, a folder, a name on the hub, or `embedded:teacher`; rows are dicts or a file.
Longer examples are in `scripts/examples/` of a checkout.

After `import llmdistill`, `AutoModelForCausalLM.from_pretrained(student)` loads a factorized student like any other
model. The import itself loads neither torch nor transformers (0.06 CPU seconds for 5): the students are registered once
transformers is loaded.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import wrapt

if TYPE_CHECKING:
    from llmdistill import losses
    from llmdistill.api import Distilled, compress, distill, evaluate, export, sizes
    from llmdistill.errors import UserError
    from llmdistill.training.distillation_loss import DistillationLoss, LossOutput
    from llmdistill.training.hf_trainer import DistillationTrainer

__version__ = "0.6.0"

_MODULES = {
    "DistillationLoss": "llmdistill.training.distillation_loss",
    "DistillationTrainer": "llmdistill.training.hf_trainer",
    "LossOutput": "llmdistill.training.distillation_loss",
    "UserError": "llmdistill.errors",
}
"""Public name -> the module from which it is loaded on first access; all others are loaded from llmdistill.api."""

__all__ = [
    "DistillationLoss",
    "DistillationTrainer",
    "Distilled",
    "LossOutput",
    "UserError",
    "__version__",
    "compress",
    "distill",
    "evaluate",
    "export",
    "losses",
    "sizes",
]

# This module registers the student classes in transformers. It is loaded as soon as transformers is imported, or
# immediately if transformers was imported before; it may also be the module that imports transformers.
wrapt.register_post_import_hook(lambda _: import_module("llmdistill.students.hub"), "transformers.quantizers.auto")


def __getattr__(name: str) -> Any:
    if name == "losses":
        return import_module("llmdistill.losses")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import_module("llmdistill.messages").quiet_imports()
    return getattr(import_module(_MODULES.get(name, "llmdistill.api")), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
