"""Converts examples to rows of a data file: the prompt alone, or the prompt with an answer."""

from __future__ import annotations

from typing import Any

from llmdistill.data.examples import Example


def prompt_row(example: Example) -> dict[str, Any]:
    """Return an example without its answers; the keys are those of the form in which it was read."""
    if example.messages:
        return {"messages": [{"role": role, "content": content} for role, content in example.messages]}
    if example.raw_prompt is not None:
        return {"prompt": example.raw_prompt}
    return {"instruction": example.instruction, "input": example.input}


def answered_row(example: Example, answer: str) -> dict[str, Any]:
    """Return an example with this answer, in the form in which the example was read."""
    row = prompt_row(example)
    if example.messages:
        return {"messages": [*row["messages"], {"role": "assistant", "content": answer}]}
    return {**row, "completion" if "prompt" in row else "output": answer}
