"""``llmdistill push``: a student's folder becomes a repository of the hub."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

from jsonargparse import ArgumentParser

from llmdistill.artifacts import CARD, MANIFEST, PLACE, manifest_damage
from llmdistill.config.command_line import parse
from llmdistill.errors import UserError
from llmdistill.messages import print_result

_FILES = (
    *("config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json"),
    *(
        "*.onnx",
        "*.onnx.data",
        "*.gguf",
        "tokenizer*",
        "vocab*",
        "merges.txt",
        "special_tokens_map.json",
        "added_tokens.json",
    ),
    *("*.model", "*.jinja", "modules.json", "sentence_*_config.json", "config_sentence_transformers.json"),
    *(CARD, "LICENSE*", "NOTICE*", "USE_POLICY*"),
)
_MODULES = ("*.json", "*.safetensors", "*.txt")
"""Files in the folders of the modules of sentence-transformers, such as 1_Pooling."""


def push(arguments: Sequence[str]) -> None:
    """Upload the files of a model; raise UserError if there is no token, a file is damaged, or the hub refuses."""
    parser = ArgumentParser(
        prog="llmdistill push",
        exit_on_error=False,
        description="Upload a student, with its tokenizer and its model card, to a repository of the Hugging Face hub "
        "in one commit. Checkpoints, data, predictions and what a teacher's cache holds stay here.",
    )
    text = "Folder of a run, whose student is taken, or of a model: a student, or what compress or export wrote."
    parser.add_argument("folder", help=text)
    parser.add_argument("name", help="Name of the repository, USER/NAME; it is created if it does not exist.")
    parser.add_argument("--private", action="store_true", help="Create the repository as a private one.")
    parsed = parse(parser, arguments)
    folder = model_folder(Path(parsed.folder))
    from huggingface_hub import CommitOperationAdd, HfApi, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(parsed.name)
    except HFValidationError as error:
        raise UserError(
            f"{parsed.name}: no repository's name; give USER/NAME (letters, digits, dots, - and _)"
        ) from error
    # Before any request, so that a damaged model leaves no empty repository behind.
    damage = manifest_damage(folder) if (folder / MANIFEST).is_file() else None
    if damage is not None:
        raise UserError(f"{damage}: make the model again or copy it again; nothing was uploaded")
    files = list(model_files(folder))
    if get_token() is None:
        raise UserError("there is no token of the hub: run `hf auth login`, or set HF_TOKEN; nothing was uploaded")
    api = HfApi(library_name="llmdistill")
    try:
        # None, not False: where the user does not say, the default of the organization holds.
        repository = api.create_repo(parsed.name, private=True if parsed.private else None, exist_ok=True)
        operations = []
        for name in files:
            content: str | bytes = str(folder / name)
            if name == CARD:  # it says where the model is
                card = (folder / name).read_text(encoding="utf-8")
                content = card.replace(f'"{PLACE}"', f'"{repository.repo_id}"').encode()
            operations.append(CommitOperationAdd(name, content))
        commit = api.create_commit(repository.repo_id, operations, commit_message="Student of llmdistill")
    except Exception as error:  # network and hub raise many types, which huggingface_hub does not unify
        reason = " ".join(str(error).split())[:400] or type(error).__name__
        raise UserError(
            f"{parsed.name}: the hub did not take it ({reason}); fix that and give the command again"
        ) from error
    without = "" if CARD in files else f"; it has no {CARD}, which a run writes at its end"
    print_result(f"{len(files)} files of {folder} are in {commit.commit_url}{without}")


def model_folder(folder: Path) -> Path:
    """Return the folder of the model: that of a run's student, or the folder itself; a UserError for any other."""
    student = folder / "student" if (folder / "run.json").is_file() else folder
    if any(student.glob("*.gguf")):
        return student
    if not (student / "config.json").is_file():
        what = "its run has no student yet: let it end" if student != folder else "no model there (no config.json)"
        raise UserError(f"{folder}: {what}; give the folder of a finished run, of a student or of an export")
    if not any(fnmatch(file.name, pattern) for file in student.iterdir() for pattern in ("*.safetensors", "*.onnx")):
        raise UserError(f"{student}: it has no weights (*.safetensors, *.onnx); give the folder of a whole model")
    return student


def model_files(folder: Path) -> Iterator[str]:
    """Yield the names of the files that belong to a model; those of the modules of sentence-transformers too."""
    for file in sorted(folder.iterdir()):
        if file.is_file() and any(fnmatch(file.name, pattern) for pattern in _FILES):
            yield file.name
        elif file.is_dir() and file.name[:1].isdigit() and "_" in file.name and (folder / "modules.json").is_file():
            inner = sorted(path for path in file.iterdir() if path.is_file())
            yield from (f"{file.name}/{path.name}" for path in inner if any(fnmatch(path.name, p) for p in _MODULES))
