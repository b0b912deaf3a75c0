"""The default data and teacher in the package: a small corpus about an invented world, and a teacher trained on it."""

from __future__ import annotations

from pathlib import Path

from llmdistill.errors import UserError

FOLDER = Path(__file__).parent
SPLITS = ("train", "valid", "seen", "unseen", "skills")
LOCATIONS = {
    "embedded:teacher": FOLDER / "teacher",
    **{f"embedded:{split}": FOLDER / "data" / f"{split}.jsonl" for split in SPLITS},
}
"""Reference -> its folder or file in the package."""


def locate(reference: str) -> Path:
    """The path of a reference: a path in the package for `embedded:NAME`, else the reference itself.

    Raises:
        UserError: the package contains no `embedded:NAME`.
    """
    if not reference.startswith("embedded:"):
        return Path(reference)
    if reference not in LOCATIONS:
        raise UserError(f"{reference!r} is not embedded in llmdistill; there are {', '.join(LOCATIONS)}")
    return LOCATIONS[reference]
