"""docs/messages.md shows every message that the package raises, and each of them has the form that it promises."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import messages
import pytest
from messages import KINDS, PAGE, ROOT, Code, Message
from noting import VARIABLE

FOUND = messages.messages()
VERBS = re.compile(
    r"(activate|add|ask|bring|build|call|change|check|choose|compare|complete|compress|copy|correct|"
    r"create|download|draw|drop|enable|end|evaluate|factorize|finish|fine-tune|free|generate|"
    r"give|go|hold|install|leave|let|load|look|lower|make|mend|merge|move|name|pass|pip|"
    r"put|quote|raise|reduce|remove|rename|repeat|replace|resume|return|run|save|say|serve|"
    r"set|show|shorten|start|stop|switch|take|train|try|unpack|untie|use|wait|write)\b"
)
"""With one of them the part of a message begins that says what to do."""
CHOICE = re.compile(
    r"\b(((there|shipped|nearest) are|(nearest|largest) that does( in this model)? is) [{(]|the roles are |expected |"
    r"only (for )?[{n]|did you mean |--data takes |needs its |has the (heads|layers) 1 to |or more\b)"
)
"""Instead of a verb a message may say what there is to choose from."""
PASSED_ON = ("{error}", "{missing}", "{listed}", "{remedy}", "{why}", "{nearest}")
"""A message that ends so goes on with another one, which has the remedy."""
NO_REMEDY = {
    "{failures}; no settings have all their seeds, so there is nothing to choose",  # begins with another message
}
ONE_OF_ITS_KIND = (
    "data ",
    "the calibration data ",
    "nothing is measured on the calibration data",
    "the batch ",
    "makd:",
)
ONE_OF_ITS_KIND += ("the model is tapped", "the deepspeed launcher ", "no C++ compiler ")
"""Messages that begin so are about what a call or a machine has once, and need no name to tell it from others."""
PROGRAMMERS = {
    "AssertionError": "an error of ours",
    "AttributeError": "Python's own rule for a module's __getattr__",
    "KeyError": "a mapping's rule; caught where it is a user's",
    "NotImplementedError": "an error of ours",
    "Stopped": "a signal; its two sentences are tested in test_signals",
    "SystemExit": "an exit code without a sentence",
    "TypeError": "caught where it is raised",
}
"""Exceptions that have no message for users, and why."""


def inputs() -> list[Message]:
    """The messages about what a user gave: a plain ValueError becomes a UserError where settings are built."""
    settings = ("config", "commands", "methods")
    return [each for each in FOUND if each.kind in ("UserError", "FieldError") or each.part in settings]


def texts(message: Message) -> list[str]:
    return [message.text, *(text for several in message.values.values() for text in several)]


def has_remedy(message: Message) -> bool:
    if message.text.endswith(PASSED_ON) or message.text in NO_REMEDY:
        return True
    parts = [part for text in texts(message) for part in re.split(r"[:;,(|)\]]|\b(?:or|and|then|so)\b", text)]
    return any(VERBS.match(part.strip()) for part in parts) or any(CHOICE.search(text) for text in texts(message))


def has_value(message: Message) -> bool:
    """Whether a value stands in it, or a setting, file or property by its written name, or what there is one of."""
    return re.search(r"\{|--\w|\w[._]\w|`", message.text) is not None or message.text.startswith(ONE_OF_ITS_KIND)


def wrong(message: Message) -> list[str]:
    """What no message may have."""
    rules = {
        "ends like a text": r"[.!\s]$",
        "has two sentences": r"[a-z)}][.!?] +[A-Z]",
        "has more than one line": r"[\n\r\t]",
        "has two spaces": r"  ",
        "speaks of the program": r"(?i)\b(traceback|exception|stack|assert\w*|bug|oops|nonetype|internal error)\b",
        "is rude or vague": r"(?i)\b(please|sorry|invalid|illegal|bad|failed to|unable to|unexpected|something went)\b",
        "begins like a text": r"^(The|A|An|You|Your|This|It|Error|Cannot|Could|No|Missing)\b",
    }
    return [rule for rule, pattern in rules.items() if re.search(pattern, message.text)]


def test_the_page_is_made_of_the_code() -> None:
    expected = messages.page(FOUND)
    assert PAGE.read_text(encoding="utf-8") == expected, "run python scripts/messages.py"
    shown = sum(line.startswith("| `") for line in expected.splitlines())
    assert shown == len({(each.file, each.text, *each.values.values()) for each in FOUND})


def test_no_exception_with_a_message_is_left_out() -> None:
    modules = Code(ROOT / "llmdistill").modules.values()
    raised = {
        node.exc.func
        for module in modules
        for node in ast.walk(module)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
    }
    names = {ast.unparse(each).rpartition(".")[2] for each in raised}
    assert {name for name in names if name[0].isupper()} <= {*KINDS, *PROGRAMMERS}


@pytest.mark.parametrize("rule", [has_remedy, has_value], ids=lambda each: each.__name__)
def test_a_message_about_input_has_what_it_needs(rule) -> None:
    assert [f"{each.file}:{each.lines[0]} {each.text}" for each in inputs() if not rule(each)] == []


def test_a_message_is_one_plain_sentence() -> None:
    assert [f"{each.file}:{each.lines[0]} {rule}: {each.text}" for each in FOUND for rule in wrong(each)] == []


SOURCE = """
_REMEDY = "make it again"

def check(path, remedy, more=None):
    what = "a folder" if path else f"a file of {path.size} bytes"
    if more:
        raise UserError(f"{path.name}: {what}{'' if more else ', or less'}; {remedy}")
    raise UserError(str(more))

def use(path):
    check(path, "give another one")
    raise UserError(f"{', '.join(map(str, path.parts))} is damaged: {_REMEDY}, " + nearest(path))
"""


def test_messages_are_read_with_what_their_values_can_be(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(SOURCE)
    first, second = Code(tmp_path).messages()
    assert first.text == "{name}: {what}[, or less]; {remedy}"
    assert first.values == {"what": ("a folder", "a file of {size} bytes"), "remedy": ("give another one",)}
    assert second.text == "{parts} is damaged: make it again, {nearest}"
    assert (second.file, second.lines, second.kind) == ("a.py", (12, 12), "UserError")


USE = """
import noting
from llmdistill.errors import UserError, check_most, check_name
from llmdistill.config import TrainConfig
from llmdistill.config.command_line import changed
noting.begin()
import pytest, os
if os.fork() == 0:
    with pytest.raises(UserError):
        check_name("", "key")
    os._exit(0)
os.wait()
with pytest.raises(UserError):
    changed(TrainConfig(), {"eps": 0}, key="train")
with pytest.raises(ValueError):
    check_most(TrainConfig(), -1, "steps", why="because")
"""


def test_what_tests_raise_is_noted_in_every_process(tmp_path: Path) -> None:
    """A UserError in a fork, a ValueError that becomes a UserError, and a ValueError that a test expects."""
    environment = {VARIABLE: str(tmp_path), "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    subprocess.run([sys.executable, "-c", USE], env=environment, check=True)
    said = messages.raised(tmp_path, FOUND)
    never = said.splitlines()[1:]
    seen = {each.text for each in FOUND} - {line.split(" ", 3)[3] for line in never}
    assert len(list(tmp_path.iterdir())) == 2
    assert {
        "{key} has the name {text}: it becomes a file's, so give one without /, \\ and line ends that does not begin "
        "with a dot",
        "{prefix}{key} is {value}: give {most} or less, {why}",
    } <= seen
    assert any("eps" in text for text in seen)
    assert re.match(rf"\d of {len(FOUND)} messages were raised", said)
    assert len(never) > len(FOUND) - 9
