"""README.md, CHANGELOG.md, CONTRIBUTING.md and docs/, and the fenced blocks in them."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING")),
    *sorted((ROOT / "docs").glob("*.md")),
]
FENCE = re.compile(r"^```(?P<kind>[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, kind: str) -> list[str]:
    """The fenced blocks of a page whose info string is `kind`."""
    return [each["text"] for each in FENCE.finditer(page.read_text(encoding="utf-8")) if each["kind"] == kind]
