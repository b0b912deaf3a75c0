"""Code that is planted in folders that commands read: it makes a folder, the marker, if it runs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from llmdistill.artifacts import MANIFEST

PICKLES = (
    *("pytorch_model.bin", "training_args.bin", "adapter_model.bin", "tf_model.h5", "flax_model.msgpack"),
    *("optimizer.pt", "scheduler.pt", "rng_state.pth", "mp_rank_00_model_states.pt", "zero_optim_states.pt"),
    *("tokenizer.pkl", "vocab.pkl", "model.pt", "data.npy", "statistics.pt", "rank-00001.pt"),
)
MODULES = (
    "modeling_mine.py",
    "configuration_mine.py",
    "tokenization_mine.py",
    "__init__.py",
    "custom_generate/generate.py",
)
AUTO_MAP = {
    "AutoConfig": "configuration_mine.Mine",
    "AutoModelForCausalLM": "modeling_mine.Mine",
    "AutoTokenizer": ["tokenization_mine.Mine", None],
}


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def plant(folder: Path, marker: Path, *, named: bool = True) -> None:
    """Plant code in a folder and in the folders below: files of many names, and configurations that name them.

    Without `named` the configurations stay as they are, so that the folder still counts as what it was.
    """
    for each in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        for name in PICKLES:
            torch.save(Payload(marker), each / name)
        for name in MODULES:
            (each / name).parent.mkdir(exist_ok=True)
            (each / name).write_text(f"import os\nos.mkdir({str(marker)!r})\n")
        for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
            if named and (each / name).is_file():
                content = json.loads((each / name).read_text())
                (each / name).write_text(json.dumps({**content, "auto_map": AUTO_MAP, "custom_generate": "."}))
        (each / MANIFEST).unlink(missing_ok=True) if named and (each / "config.json").is_file() else None
