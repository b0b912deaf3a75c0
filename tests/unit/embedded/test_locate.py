from __future__ import annotations

from pathlib import Path

import pytest

from llmdistill.embedded import LOCATIONS, locate
from llmdistill.errors import UserError


@pytest.mark.parametrize("reference", list(LOCATIONS))
def test_every_embedded_name_is_there(reference: str) -> None:
    assert locate(reference).exists()


@pytest.mark.parametrize("reference", ["teacher", "models/llama", "/data/train.jsonl"])
def test_other_references_are_paths(reference: str) -> None:
    assert locate(reference) == Path(reference)


def test_unknown_name_lists_the_known() -> None:
    with pytest.raises(UserError, match=r"embedded:dev.*embedded:teacher.*embedded:skills"):
        locate("embedded:dev")
