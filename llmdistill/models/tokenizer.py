"""Tokenizers: loading them with an end token and a padding token, and comparing them between models."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import cast

from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from llmdistill.errors import UserError
from llmdistill.files import read_json
from llmdistill.models.adapters import CONFIG_FILE, adapter_folder, of_base
from llmdistill.models.configs import load_config, local_folder, not_loaded
from llmdistill.models.unembedded import set_rows

_SENTENCEPIECE_FILES = ("tokenizer.model", "sentencepiece.bpe.model")
_TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "vocab.txt", *_SENTENCEPIECE_FILES)
_OTHER_TOKENIZERS = ("tekken.json", "*.tiktoken", "tiktoken.model")
"""What other libraries read; Mistral, Qwen and Kimi have them."""
_PROCESSOR_TEMPLATE = "chat_template.json"
"""The chat template of an older model that sees images too, whose processor had it."""
_GPT2_END = "<|endoftext|>"
_SAMPLE = "The answer to this question is that there are 12 of them, not 7."
_REMEDY = (
    "their logits cannot be compared position by position; for decoders take --method kd, which compares the text that "
    "both read, a student with the teacher's vocabulary, or learn from the teacher's text: llmdistill generate, then "
    "--method seqkd"
)


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load a tokenizer that has an end token and a padding token; the padding side is not changed.

    Without a padding token, as in GPT-2's, the end token becomes the padding token, because padding is marked by masks
    and not by token ids. A folder with only tokenizer.json names no end token either. Then the end token is that of
    config.json in the same folder, or else GPT-2's <|endoftext|> if the vocabulary has it. For a peft adapter without a
    tokenizer, the tokenizer of its base is loaded. An `add_bos_token` in tokenizer_config.json is obeyed. Raises
    UserError if the folder or name does not exist or has no tokenizer, if the tokenizer has no end token or is not the
    model's (`fit_tokenizer`), or if transformers would read a sentencepiece model wrongly.
    """
    folder, adapter = local_folder(path), adapter_folder(path)
    if adapter is not None and not has_tokenizer(adapter):
        return of_base(adapter, load_tokenizer)
    if folder is not None and not has_tokenizer(folder):
        others = [file.name for pattern in _OTHER_TOKENIZERS for file in folder.glob(pattern)]
        remedy = (
            f"{others[0]} is not read, take the tokenizer.json of the same model" if others else "copy its files in"
        )
        raise UserError(f"{path}: no tokenizer there (none of {', '.join(_TOKENIZER_FILES)}): {remedy}")
    sentencepiece = None
    if folder is not None and not (folder / "tokenizer.json").is_file():
        sentencepiece = next((folder / name for name in _SENTENCEPIECE_FILES if (folder / name).is_file()), None)
    if sentencepiece is not None:
        for package, module in (("sentencepiece", "sentencepiece"), ("protobuf", "google.protobuf")):
            try:
                import_module(module)
            except ImportError as error:
                raise UserError(
                    f"{sentencepiece}: reading it needs the package {package}: pip install {package}"
                ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        # transformers ignores this setting if there is a tokenizer.json, whose post-processor may be older than it.
        adds_begin = get_tokenizer_config(path).get("add_bos_token") is True and tokenizer.bos_token is not None
    except Exception as error:  # the tokenizers library raises plain Exception for a damaged file
        raise not_loaded(path, "tokenizer", error) from error
    if tokenizer.chat_template is None and folder is not None and (folder / _PROCESSOR_TEMPLATE).is_file():
        processor = read_json(folder / _PROCESSOR_TEMPLATE)
        tokenizer.chat_template = processor.get("chat_template") if isinstance(processor, dict) else None
    longest = tokenizer.model_max_length
    # Only NaN, which JSON can hold, differs from itself.
    if not isinstance(longest, int | float) or longest != longest or longest < 1:
        raise UserError(
            f"{path}/tokenizer_config.json: model_max_length is {str(longest)[:60]!r}: give a number of tokens from 1, "
            "or remove the key"
        )
    if adds_begin and tokenizer("a")["input_ids"] == tokenizer("a", add_special_tokens=False)["input_ids"]:
        tokenizer.add_bos_token = True  # type: ignore[misc]
    if sentencepiece is not None:
        _check_sentencepiece(tokenizer, sentencepiece)
    if adapter is None and (folder is None or (folder / "config.json").is_file()):
        fit_tokenizer(tokenizer, load_config(path), path)
    # Encoders end a sequence with their separator token, so an end token is missing only if there is no separator.
    if tokenizer.eos_token is None and tokenizer.sep_token is None:
        end = _GPT2_END if _GPT2_END in tokenizer.get_vocab() else None
        if folder is not None and any((folder / name).is_file() for name in ("config.json", CONFIG_FILE)):
            index = load_config(folder).eos_token_id
            if isinstance(index, int):
                end = cast("str | None", tokenizer.convert_ids_to_tokens(index))
        if end is None:
            raise UserError(f"{path}: the tokenizer names no end token: add eos_token to tokenizer_config.json")
        tokenizer.eos_token = end
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.sep_token if tokenizer.eos_token is None else tokenizer.eos_token
    return cast(PreTrainedTokenizerBase, tokenizer)


def fit_tokenizer(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, path: str | Path) -> None:
    """Note which tokens have an embedding in the model; embeddings beyond the tokens are padding, as in many models.

    Tokens that were added to a vocabulary may have none: Gemma 3 of text alone has no row for the token of an image,
    and such tokens are refused where data use them (`models.unembedded`). A padding or mask token without one is none.
    Raises UserError if a token of the vocabulary itself has none, or one that stands in every text.
    """
    rows = getattr(config.get_text_config(), "vocab_size", None)
    beyond = [entry for entry in tokenizer.get_vocab().items() if rows is not None and entry[1] >= rows]
    set_rows(tokenizer, rows if beyond else None)
    if rows is None or not beyond:
        return
    for name in ("pad_token", "mask_token"):
        if (getattr(tokenizer, f"{name}_id") or 0) >= rows:
            setattr(tokenizer, name, None)
    marks = {*tokenizer("")["input_ids"], *(getattr(tokenizer, f"{name}_token_id") for name in ("eos", "cls", "sep"))}
    wrong = [entry for entry in beyond if entry[1] not in tokenizer.added_tokens_decoder or entry[1] in marks]
    if wrong:
        token, index = max(wrong, key=lambda item: item[1])
        raise UserError(
            f"{path}: the tokenizer's token {repr(token)[:60]} has the id {index}, and the model has {rows} "
            "embeddings: take the model's own tokenizer, or resize the embeddings"
        )


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder holds the files of a tokenizer."""
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


def compare_vocabularies(teacher: str | Path, student: str | Path) -> tuple[int, str | None]:
    """Return the number of logits that two models share, counted from the first, and a note if others are left out.

    Logits can be compared only if each token id means the same token to both models. Some models of a family pad their
    vocabulary to a larger size than others: rows beyond the tokenizer's are not tokens and are left out. A student
    folder without a tokenizer uses the teacher's tokenizer; then the sizes must be equal. Raises UserError if the
    tokens differ, or if the sizes differ by more than padding.
    """
    sizes = load_config(teacher).vocab_size, load_config(student).vocab_size
    least, rows = min(sizes), abs(sizes[0] - sizes[1])
    if not brings_tokenizer(student):
        if rows:
            whose = f"teacher {teacher} has a vocabulary of {sizes[0]} tokens and student {student} one of {sizes[1]}"
            raise UserError(f"{whose}: {_REMEDY}")
        return least, None
    teacher_ids, student_ids = load_tokenizer(teacher).get_vocab(), load_tokenizer(student).get_vocab()
    differing = sorted(set(teacher_ids.items()) ^ set(student_ids.items()), key=lambda item: item[1])
    if differing:
        token, index = differing[0]
        raise UserError(
            f"teacher {teacher} and student {student} have different tokenizers, first at id {index} ({token!r}): "
            f"{_REMEDY}"
        )
    if not rows:
        return least, None
    return least, (
        f"teacher has {sizes[0]:,} vocabulary rows and student {sizes[1]:,}: the {rows:,} rows beyond those both have "
        "are padding and are left out of the output losses"
    )


def check_tokens(teacher: str | Path, student: str | Path) -> None:
    """Raise a UserError if the tokenizers of teacher and student have different tokens."""
    if load_tokenizer(teacher).get_vocab() != load_tokenizer(student).get_vocab():
        raise UserError(
            f"teacher.model {teacher}: its tokenizer is not that of {student}, and both see the same tokens; give a "
            "teacher with the student's tokenizer"
        )


def brings_tokenizer(path: str | Path) -> bool:
    """Return whether a model, or the base of an adapter, has a tokenizer; assume True for a model on the hub."""
    folder, adapter = local_folder(path), adapter_folder(path)
    if folder is None or has_tokenizer(folder):
        return True
    return adapter is not None and of_base(adapter, brings_tokenizer)


def _check_sentencepiece(tokenizer: PreTrainedTokenizerBase, file: Path) -> None:
    """Raise a UserError if transformers splits text differently from the sentencepiece model.

    It does so silently without the right tokenizer_class.
    """
    from sentencepiece import SentencePieceProcessor

    try:
        model = SentencePieceProcessor(model_file=str(file))
    except (OSError, RuntimeError):  # not sentencepiece: tiktoken's files have the same name
        return
    settings = file.with_name("tokenizer_config.json")
    if settings.is_file() and json.loads(settings.read_text(encoding="utf-8")).get("add_prefix_space") is False:
        return  # the user's setting overrides the sentencepiece model
    wanted = [model.id_to_piece(index) for index in model.encode(_SAMPLE)]
    tokens = tokenizer.convert_ids_to_tokens(tokenizer(_SAMPLE, add_special_tokens=False)["input_ids"])
    if tokens != wanted:
        raise UserError(
            f"{file}: as a {type(tokenizer).__name__} it cuts text otherwise than sentencepiece does: name the "
            "tokenizer_class it was made for in tokenizer_config.json (LlamaTokenizer reads models of type BPE), "
            "or bring its tokenizer.json"
        )
