"""How perplexities are shown."""

import math

import pytest

from llmdistill.tasks.perplexity import show_perplexity


@pytest.mark.parametrize(("value", "shown"), [
    (None, "–"), (1.0, "1.00"), (1.054, "1.05"), (1.1, "1.10"), (9.999, "10.0"), (23.6, "23.6"), (100.2, "100"),
    (999.4, "999"), (999.5, "1,000"), (12345.0, "12,345"), (2e7, "2.00e+07"), (math.inf, "inf"),
])  # fmt: skip
def test_a_column_has_three_digits_of_each_number_or_whole_ones(value, shown):
    assert show_perplexity(value) == shown
