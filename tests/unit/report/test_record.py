from __future__ import annotations

import torch

import llmdistill
from llmdistill.report.record import describe_versions, make_record


def test_versions_are_those_of_what_is_installed() -> None:
    record = make_record("the command", 1, ("torch", "no-such-library"))
    assert record["versions"] == {"llmdistill": llmdistill.__version__, "torch": torch.__version__}
    assert describe_versions(record) == f"llmdistill {llmdistill.__version__}, torch {torch.__version__}"
    assert make_record("the command", 1)["versions"].keys() == {"llmdistill", "torch", "deepspeed", "transformers"}
