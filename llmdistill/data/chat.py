"""Renders conversations by a tokenizer's chat template, within limits of time, memory and length.

A template is a program: jinja's sandbox keeps it from files and commands, but not from `{{ 'a' * 10**12 }}`, from loops
in loops, or from a text that doubles in each round. Limits on single operations of jinja would leave gaps (repetition,
padding, replacing, joining, macros that call themselves), so the operating system limits a process that only renders.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

Messages = list[dict[str, str]]

CPU_SECONDS = 5
"""For one conversation; an ordinary template takes less than a millisecond."""
MEMORY_BYTES = 1 << 29
"""What rendering may need beside what the process has already."""
LONGEST_TEXT = 10_000_000
"""In characters."""
LONGEST_TEMPLATE = 1_000_000
"""In characters; the longest of published models have about 20,000."""
_PATIENCE = 600.0
"""Seconds without a text after which a process that uses no CPU time is given up."""


class ChatError(Exception):
    """A conversation that the template does not render; the message is a clause about the template."""

    def __init__(self, index: int, message: str) -> None:
        """`index` is that of the conversation among the given ones."""
        super().__init__(message)
        self.index = index


def render_chats(conversations: Sequence[Messages], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the text of each conversation up to the beginning of the assistant's turn.

    They are rendered in a fork of this process: it needs no second import of transformers, and it has the template that
    an earlier call has compiled.

    Raises:
        ChatError: the template refuses a conversation, or reaches a limit.
    """
    if len(str(tokenizer.chat_template)) > LONGEST_TEMPLATE:
        raise ChatError(0, f"has more than {LONGEST_TEMPLATE:,} characters")
    answers, writing = os.pipe()
    with _quiet_fork():
        child = os.fork()
    if child == 0:
        try:
            os.close(answers)
            _render_all(conversations, tokenizer, writing)
        finally:
            os._exit(0)
    os.close(writing)
    try:
        lines = list(_lines(answers))
    finally:
        os.close(answers)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    texts = [json.loads(line) for line in lines]
    failed = next((index for index, text in enumerate(texts) if "error" in text), None)
    if failed is not None:
        raise ChatError(failed, texts[failed]["error"])
    if len(texts) < len(conversations):
        late = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU
        limit = f"takes more than {CPU_SECONDS} seconds" if late else "ends the process that renders it"
        raise ChatError(len(texts), f"{limit} for one conversation")
    _keep_compiled(tokenizer)
    return [text["text"] for text in texts]


@contextmanager
def _quiet_fork() -> Iterator[None]:
    """Block in which a fork lets the tokenizers library print no warning; the child uses no tokenizer."""
    name = "TOKENIZERS_PARALLELISM"
    unset = name not in os.environ
    if unset:
        os.environ[name] = "true"
    try:
        yield
    finally:
        if unset:
            del os.environ[name]


def _render_all(conversations: Sequence[Messages], tokenizer: PreTrainedTokenizerBase, writing: int) -> None:
    """Write the text of each conversation, or why there is none, as a line of JSON; in the child."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)  # the parent decides what a signal means
    _limit(resource.RLIMIT_AS, _virtual_bytes() + MEMORY_BYTES)
    with os.fdopen(writing, "w", encoding="ascii") as file:
        for messages in conversations:
            used = resource.getrusage(resource.RUSAGE_SELF)
            _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + CPU_SECONDS)
            answer = _answer(messages, tokenizer)
            file.write(json.dumps(answer) + "\n")
            file.flush()  # the next one may end this process
            if "error" in answer:
                return


def _answer(messages: Messages, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except MemoryError:
        return {"error": f"needs more than {MEMORY_BYTES >> 20} MB of memory for one conversation"}
    except Exception as error:  # a template can raise anything
        return {"error": f"refuses the messages ({str(error)[:300] or type(error).__name__})"}
    if len(text) > LONGEST_TEXT:
        return {"error": f"makes a text of {len(text):,} characters of one conversation, over {LONGEST_TEXT:,}"}
    return {"text": text}


def _limit(what: int, value: int) -> None:
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _virtual_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()


def _lines(answers: int) -> Iterator[bytes]:
    """Read whole lines until the other end is closed."""
    rest = b""
    while select.select([answers], [], [], _PATIENCE)[0]:
        block = os.read(answers, 1 << 16)
        if not block:
            return
        *whole, rest = (rest + block).split(b"\n")
        yield from whole


def _keep_compiled(tokenizer: Any) -> None:
    """Compile the template here, now that a child did so within the limits: transformers keeps it for later forks."""
    with suppress(ImportError):
        from transformers.utils.chat_template_utils import _compile_jinja_template

        _compile_jinja_template(tokenizer.get_chat_template())
