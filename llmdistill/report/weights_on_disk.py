"""What the weights of a model hold on disk: the size of their parts and the formats of their numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

EMBEDDINGS, FACTORS, OTHERS = "embeddings and head", "factors", "others"

_FORMATS = {"F64": "fp64", "F32": "fp32", "F16": "fp16", "BF16": "bf16", "I64": "int64", "I8": "int8", "U8": "uint8"}
"""The usual names of the formats of safetensors."""

# A head may be called decoder, but so may the module that holds all layers.
_EMBEDDINGS = re.compile(r"(^|[._])(embed\w*|wte|wpe|lm_head)\.|(^|\.)decoder\.(weight|bias)$")
# The order of the rows stands beside factors of the pivoted form, and the LoRA factors in an adapter of PEFT.
_FACTORS = re.compile(r"\.(lora_)?[AB](\.weight|\.bias|\._weight_\w+)?$|\.order$")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    size: int
    formats: Mapping[str, int]
    """Number of values by format, such as F32 or BF16."""
    parts: Mapping[str, int]
    """Bytes by part: `EMBEDDINGS`, `FACTORS` (of matrices in the layers) and `OTHERS`."""

    @property
    def number_format(self) -> str:
        """The formats of its numbers, the most frequent first, such as ``fp32`` or ``int8 and bf16``."""
        names = sorted(self.formats, key=lambda name: -self.formats[name])
        return " and ".join(_FORMATS.get(name, name) for name in names)

    @property
    def summary(self) -> str:
        """Why it is as large as it is, such as ``fp32: embeddings and head 50%, factors 48%, others 2%``."""
        total = sum(self.parts.values())
        shares = (f"{name} {size / total:.0%}" for name, size in self.parts.items() if size)
        return f"{self.number_format}: {', '.join(shares)}"


def read_checkpoint(folder: Path) -> Checkpoint | None:
    """Return what the safetensors files of a folder hold, from their headers; None if there are no values."""
    formats: dict[str, int] = {}
    parts = dict.fromkeys((EMBEDDINGS, FACTORS, OTHERS), 0)
    files = sorted(folder.glob("*.safetensors"))
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                values = file.get_slice(name)
                count, kind = math.prod(values.get_shape()), values.get_dtype()
                formats[kind] = formats.get(kind, 0) + count
                part = EMBEDDINGS if _EMBEDDINGS.search(name) else FACTORS if _FACTORS.search(name) else OTHERS
                # Formats such as F8_E4M3 or BOOL: the first number in the name is the bits, and no number means a byte.
                bits = re.search(r"\d+", kind)
                parts[part] += count * (1 if bits is None else max(1, int(bits.group()) // 8))
    size = sum(path.stat().st_size for path in files)
    return Checkpoint(size=size, formats=formats, parts=parts) if any(parts.values()) else None
