"""The names that `llmdistill.losses` loads when they are asked for."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from llmdistill import losses


def test_a_type_checker_sees_what_is_loaded():
    tree = ast.parse(Path(str(losses.__file__)).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {name.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for name in node.names}
    assert seen == {name: f"llmdistill.losses.{module}" for name, module in losses._MODULES.items()}
    assert all(getattr(losses, name) is not None for name in losses.__all__)


def test_another_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'attention_lk'"):
        losses.attention_lk  # noqa: B018
