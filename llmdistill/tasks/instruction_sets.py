"""The instruction sets and texts that papers report, by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llmdistill.config.strict import did_you_mean
from llmdistill.data.whole_text import WholeText
from llmdistill.errors import UserError
from llmdistill.tasks import is_task

SETS = {
    "dolly": "hf://datasets/MiniLLM/dolly/valid.jsonl",
    "self_inst": "hf://datasets/MiniLLM/self-inst/valid.jsonl",
    "vicuna": "hf://datasets/MiniLLM/Vicuna/valid.jsonl",
    "seen": "embedded:seen",
    "unseen": "embedded:unseen",
    "skills": "embedded:skills",
}
"""Name -> reference of the set: MiniLLM's test sets on the Hub, and the sets shipped with the package."""

TEXTS = {"wikitext2": "Salesforce/wikitext:wikitext-2-raw-v1:test"}
"""Name -> reference of the text: WikiText-2's test split, whose perplexity the papers on SVD report."""
_TEXT_FILES = ("test.txt", "wiki.test.raw", "wiki.test.tokens")


def suite_sets(names: str, folder: Path | None, *, others: Sequence[str] = ()) -> dict[str, str | WholeText]:
    """Return {name: reference, or text} for sets given as `dolly,self_inst,wikitext2`.

    If a folder is given, sets that are not shipped with the package are read from it: from NAME.jsonl, else from the
    file whose name begins with NAME; a text from NAME.txt or test.txt, there or in its folder NAME. The folder may also
    be the file of a text itself. `others` are suites that are no sets, for the hint in the error.

    Raises:
        UserError: a name is not the name of a set, or the folder does not contain the set.
    """
    references: dict[str, str | WholeText] = {}
    for name in (part.strip() for part in names.split(",")):
        if name in TEXTS:
            text: str | Path | None = TEXTS[name]
            if folder is not None:
                candidates = [
                    folder,
                    folder / f"{name}.txt",
                    *(parent / file for parent in (folder, folder / name) for file in _TEXT_FILES),
                ]
                text = next((path for path in candidates if path.is_file()), None)
            if text is None:
                raise UserError(
                    f"--data_dir {folder}: it has neither {name}.txt nor {_TEXT_FILES[0]}; add one or name the file"
                )
            references[name] = WholeText(text, lines=True)
            continue
        if name in others:
            raise UserError(f"--suite {names}: {name} has settings of its own; give it alone, in a command of its own")
        if name not in SETS:
            known = [*SETS, *TEXTS, *others]
            if is_task(name):
                raise UserError(
                    f"--suite {name}: it is a task, on which a model is fine-tuned first; take --suite glue --tasks "
                    f"{name}, from Python llmdistill.evaluate(model, {name!r}) for one that is fine-tuned"
                )
            there = f"there are {', '.join(known)}; --data takes any file"
            raise UserError(f"--suite: there is no set {name!r}{did_you_mean(name, known)} ({there})")
        if SETS[name].startswith("embedded:") or folder is None:
            references[name] = SETS[name]
            continue
        exact = folder / f"{name}.jsonl"
        matches = [exact] if exact.is_file() else sorted(folder.glob(f"{name}*.jsonl"))
        if len(matches) != 1:
            there = ", ".join(sorted(file.name for file in folder.glob("*.jsonl"))) or "no JSONL file"
            raise UserError(
                f"--data_dir {folder}: it has no {name}.jsonl (there is {there}); add it or name it with --data"
            )
        references[name] = str(matches[0])
    return references
