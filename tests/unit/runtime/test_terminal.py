"""What a command shows in the terminal: its own words, and none of the libraries'."""

import warnings

import pytest

from llmdistill.runtime.terminal import guest, quiet_transformers


@pytest.mark.parametrize("kind", [FutureWarning, DeprecationWarning])
def test_deprecations_inside_libraries_are_hidden(kind):
    with guest(), warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        quiet_transformers()
        warnings.warn("use another name", kind, stacklevel=1)
        warnings.warn("this concerns the user", UserWarning, stacklevel=1)
    assert [str(each.message) for each in shown] == ["this concerns the user"]
