"""An example of instructions: a prompt with its answers, as it was read from a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmdistill.data.chat_messages import Messages, Turn
from llmdistill.errors import UserError


@dataclass(frozen=True)
class Example:
    """One prompt with its answers, in one of three formats: an instruction, a prompt without template, or messages."""

    instruction: str
    """The instruction; empty in the other two formats."""
    input: str
    """Further context of the instruction; empty if there is none."""
    outputs: tuple[str, ...]
    """The reference answers; training uses the first, scoring takes the best match. Empty only for generation, which
    needs no answer."""
    source: str = field(default="", compare=False)
    """The place of the example, as ``file:line``; only for messages to the user."""
    messages: Messages = ()
    """The turns before the answer, for the tokenizer's chat template; empty in the other two formats. Assistant turns
    among them are answers too."""
    answer_fields: Mapping[str, Any] = field(default_factory=dict)
    """The keys of the answer's message beside role and content, as `Turn.fields`; only for messages."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """The tools that the chat template describes to the model; only for messages."""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the chat template (``chat_template_kwargs``), such as enable_thinking."""
    raw_prompt: str | None = None
    """A prompt that is used as it is, without any template; None in the other two formats."""
    teacher: str = ""
    """The name of the teacher that the row asks for; empty if it names none."""
    chat_key: str = ""
    """The key, such as system, that made messages of an instruction, because only a chat template has a place for it;
    empty for rows that were given as messages."""

    def num_characters(self) -> int:
        """Return about how long the text of the example is."""
        texts = (self.instruction, self.input, self.raw_prompt or "", *self.outputs)
        return sum(map(len, texts)) + sum(len(turn.content) for turn in self.messages)

    def user_turn(self) -> Turn:
        """Return an instruction as the user's turn in a chat, its input after a blank line."""
        return Turn("user", "\n\n".join(part for part in (self.instruction, self.input) if part))


def all_empty(examples: Sequence[Example]) -> bool:
    """Return whether no example has an answer; an answer without words may still call tools."""
    return not any(example.answer_fields or any(output.strip() for output in example.outputs) for example in examples)


def no_answer(name: str | Path, count: int, *, which: str = "all") -> UserError:
    """Return the error for a data set whose answers are all empty, as far as it was read."""
    return UserError(
        f"{name}: the answers of {which} {count} examples are empty, so nothing but the end of an answer is there to "
        "learn or to compare with; look at the key of the answers (output, completion, response or messages)"
    )
