"""Compress language models by factorisation and distillation.

Importing the package teaches transformers to load factorised students: after `import llmdistill`,
`AutoModelForCausalLM.from_pretrained(student)` works like for any model.
"""

from __future__ import annotations

from llmdistill.factorize import hub

__version__ = "0.5.0"

hub.register()
