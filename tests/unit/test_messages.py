"""Every message of the package is one plain sentence, without a traceback's words and without a full stop."""

import ast
import re

from pages import ROOT

WRONG = {
    "ends like a text": r"[.!\s]$",
    "has two sentences": r"[a-z)}][.!?] +[A-Z]",
    "has more than one line": r"[\n\r\t]",
    "has two spaces": r"  ",
    "speaks of the program": r"(?i)\b(traceback|exception|stack|assert\w*|bug|oops|nonetype|internal error)\b",
    "is rude or vague": r"(?i)\b(please|sorry|invalid|illegal|bad|failed to|unable to|unexpected|something went)\b",
    "begins like a text": r"^(The|A|An|You|Your|This|It|Error|Cannot|Could|No|Missing)\b",
}
"""What no message may have."""


def text_of(node: ast.expr) -> str:
    """The words of a message, with {} for each value."""
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in parts)


def messages() -> dict[str, str]:
    """The message of each exception that is made for a user, by its file and line."""
    found = {}
    for path in sorted((ROOT / "llmdistill").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            kinds = ("UserError", "FieldError", "ValueError", "RuntimeError")
            if isinstance(node, ast.Call) and ast.unparse(node.func) in kinds and node.args:
                found[f"{path.relative_to(ROOT)}:{node.lineno}"] = text_of(node.args[0])
    return found


def test_a_message_is_one_plain_sentence() -> None:
    found = messages()
    assert len(found) > 300
    wrong = [(rule, place, text) for place, text in found.items() for rule in WRONG if re.search(WRONG[rule], text)]
    assert wrong == []
