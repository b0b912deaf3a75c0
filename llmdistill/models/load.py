"""Loading configs, models and tokenizers. Nothing loaded can run code: safetensors only, no remote code."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from textwrap import shorten
from typing import Any, Literal, TypeVar, cast

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from llmdistill.errors import UserError
from llmdistill.models.adapters import CONFIG_FILE, adapter_folder, apply_adapter, base_of, cast_parameters
from llmdistill.models.families import family_named, family_of

_SENTENCEPIECE_FILES = ("tokenizer.model", "sentencepiece.bpe.model")
_TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "vocab.txt", *_SENTENCEPIECE_FILES)
_GPT2_END = "<|endoftext|>"
_SAMPLE = "The answer to this question is that there are 12 of them, not 7."
_REMEDY = (
    "their logits cannot be compared; take a student with the teacher's vocabulary, or learn from the teacher's text: "
    "llmdistill generate, then --method seqkd"
)

Loaded = TypeVar("Loaded")

Head = Literal["lm_head", "pretraining", "sequence", "none"]
"""What stands on a model: lm_head, the language-model head (causal for decoders, masked for encoders); pretraining,
that and BERT's next-sentence head; sequence, a classifier of whole sequences; none, an encoder without any."""


def load_config(path: str | Path) -> PreTrainedConfig:
    """The config of a model of a supported architecture; for a peft adapter, its base's.

    Args:
        path: a folder with config.json or adapter_config.json, or a name on the hub.

    Raises:
        UserError: no such folder, no config.json in it, not JSON, an unknown architecture, or the hub has no such
            name or cannot be reached.
    """
    folder, adapter = _local_folder(path), adapter_folder(path)
    if adapter is not None:
        return _of_base(adapter, load_config)
    if folder is not None:
        _check_config_file(folder / "config.json")
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # whatever a bad value provokes in the config's own checks
        raise _not_loaded(path, "config", error) from error
    family_of(config)
    return cast(PreTrainedConfig, config)


def auto_class(config: PreTrainedConfig, head: Head) -> Any:
    """The class of transformers that loads a model with a head; a decoder's is its language-model head or a
    classifier."""
    if head == "sequence":
        return AutoModelForSequenceClassification
    if family_of(config).causal:
        return AutoModelForCausalLM
    return {"lm_head": AutoModelForMaskedLM, "pretraining": AutoModelForPreTraining, "none": AutoModel}[head]


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str | None = None,
    head: Head = "lm_head",
    new_head: bool = False,
    num_classes: int | None = None,
) -> PreTrainedModel:
    """A model in evaluation mode, by default with its language-model head.

    Args:
        path: a folder, or a name on the hub; a peft adapter comes merged into its base, in fp32 before it is cast.
        dtype: of the weights.
        device: where to put it; None leaves it where it was loaded.
        head: what stands on it.
        new_head: whether a head that the weights lack starts from random numbers (drawn from torch's generator)
            instead of being an error.
        num_classes: of a new classifier, 1 for one that predicts a score; None takes what the config says.

    Raises:
        UserError: as `load_config`, or no safetensors, weights that are missing or do not fit the config, or an
            adapter that does not fit its base.
    """
    _, adapter = _local_folder(path), adapter_folder(path)
    if adapter is None:
        model = _load_weights(path, dtype, head, new_head, num_classes)
    else:
        whole = partial(_load_weights, dtype=torch.float32, head=head, new_head=new_head, num_classes=num_classes)
        model = apply_adapter(_of_base(adapter, whole), adapter)
        cast_parameters(model, dtype)
    return model if device is None else cast(PreTrainedModel, model.to(cast(Any, device)))


def _load_weights(
    path: str | Path, dtype: torch.dtype, head: Head, new_head: bool, num_classes: int | None
) -> PreTrainedModel:
    config = load_config(path)
    if num_classes is not None:
        config.num_labels = num_classes
    if head == "sequence" and config.pad_token_id is None:  # a decoder classifies by its last token that is no padding
        config.pad_token_id = load_tokenizer(path).pad_token_id
    try:
        loaded: Any = auto_class(config, head).from_pretrained(
            path,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            attn_implementation="sdpa",
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        if isinstance(error, UserError | torch.OutOfMemoryError):
            raise
        raise _not_loaded(path, "weights (safetensors)", error) from error
    model, info = loaded
    missing = {name for name in info["missing_keys"] if not _may_be_new(model, name, new_head)}
    if missing:  # transformers would go on with random numbers in their place
        raise UserError(
            f"{path}: {len(missing)} weights are missing, such as {min(missing)}: the folder is not a whole checkpoint "
            f"of this architecture{_WITH_HEAD[head]}"
        )
    return cast(PreTrainedModel, model)


_WITH_HEAD: dict[Head, str] = {
    "lm_head": " with its language-model head (terms on hidden states, matrices and relations need none: set the "
    "weights of those on the output to 0)",
    "pretraining": " with its masked-word and next-sentence heads (data.text.next_sentence=false drops the latter)",
    "sequence": " with a classifier",
    "none": "",
}


def _may_be_new(model: PreTrainedModel, name: str, new_head: bool) -> bool:
    """Whether a weight may start anew: the pooler where no head reads it, and a head's where that is wanted."""
    in_base = name.startswith(f"{model.base_model_prefix}.") or model.base_model is model
    if ".pooler." in f".{name}":
        return new_head or model.base_model is model
    return new_head and not in_base


def build_meta(config: PreTrainedConfig) -> PreTrainedModel:
    """The model of a config on the meta device, without weights, for counting and planning.

    Base model (with pooler) for encoders and causal LM for decoders, as papers count their parameters.

    Raises:
        UserError: the architecture is not supported.
    """
    auto = AutoModelForCausalLM if family_of(config).causal else AutoModel
    with torch.device("meta"):
        return cast(PreTrainedModel, auto.from_config(config, attn_implementation="sdpa", trust_remote_code=False))


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """A tokenizer that has an end and a padding token; its padding side is left as it is.

    GPT-2's has no padding token, and neither have many others: the end token is taken for it, as masks and not token
    ids say what is padding. A folder with a bare tokenizer.json names no end token either: then it is the one of
    config.json beside it, or else GPT-2's <|endoftext|> where the vocabulary has it. A peft adapter without tokenizer
    has its base's.

    Raises:
        UserError: no such folder or name, no tokenizer in it, no end token, or a sentencepiece model that would be
            read as something else.
    """
    folder, adapter = _local_folder(path), adapter_folder(path)
    if adapter is not None and not has_tokenizer(adapter):
        return _of_base(adapter, load_tokenizer)
    if folder is not None and not has_tokenizer(folder):
        raise UserError(f"{path}: no tokenizer there (none of {', '.join(_TOKENIZER_FILES)}): copy its files in")
    sentencepiece = None if folder is None else _sentencepiece_file(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises plain Exception for a damaged file
        raise _not_loaded(path, "tokenizer", error) from error
    if sentencepiece is not None:
        _check_sentencepiece(tokenizer, sentencepiece)
    # Encoders end with their separator; only where there is neither does a decoder's folder lack something.
    if tokenizer.eos_token is None and tokenizer.sep_token is None:
        end = _end_token(tokenizer, folder)
        if end is None:
            raise UserError(f"{path}: the tokenizer names no end token: add eos_token to tokenizer_config.json")
        tokenizer.eos_token = end
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.sep_token if tokenizer.eos_token is None else tokenizer.eos_token
    return cast(PreTrainedTokenizerBase, tokenizer)


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds the files of a tokenizer."""
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


def compare_vocabularies(teacher: str | Path, student: str | Path) -> tuple[int, str | None]:
    """How many logits two models share, from the first on, and a note on the others where there are any.

    A token id must mean the same to both before their logits are compared. Some models of a family pad their
    vocabulary further than others: rows beyond the tokenizer's are no tokens and are left out. A student folder
    without tokenizer goes by the teacher's; then the sizes must be the same. Both are folders or hub names.

    Raises:
        UserError: the tokens differ, or the sizes do and more than padding would be lost.
    """
    sizes = load_config(teacher).vocab_size, load_config(student).vocab_size
    least, rows = min(sizes), abs(sizes[0] - sizes[1])
    different = (
        f"teacher {teacher} has a vocabulary of {sizes[0]} tokens and student {student} one of {sizes[1]}: {_REMEDY}"
    )
    if not brings_tokenizer(student):
        if rows:
            raise UserError(different)
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
    if max(teacher_ids.values()) >= least:
        raise UserError(different)
    return least, (
        f"teacher has {sizes[0]:,} vocabulary rows and student {sizes[1]:,}: the {rows:,} rows beyond those both have "
        "are padding and are left out of the output losses"
    )


def check_tokens(teacher: str | Path, student: str | Path) -> None:
    """Whether a teacher sees the student's tokens.

    Raises:
        UserError: their tokenizers differ.
    """
    if load_tokenizer(teacher).get_vocab() != load_tokenizer(student).get_vocab():
        raise UserError(
            f"teacher.model {teacher}: its tokenizer is not that of {student}, and both see the same tokens; give a "
            "teacher with the student's tokenizer"
        )


def brings_tokenizer(path: str | Path) -> bool:
    """Whether a model comes with a tokenizer, an adapter with its base's; what is on the hub is taken to."""
    folder, adapter = _local_folder(path), adapter_folder(path)
    if folder is None or has_tokenizer(folder):
        return True
    return adapter is not None and _of_base(adapter, brings_tokenizer)


def _of_base(adapter: Path, load: Callable[[str], Loaded]) -> Loaded:
    """What the base of an adapter gives; a mistake there is told as the adapter's."""
    base = base_of(adapter)
    try:
        return load(base)
    except UserError as error:
        raise UserError(f"{adapter / CONFIG_FILE}: base_model_name_or_path: {error}") from error


def _local_folder(path: str | Path) -> Path | None:
    """The folder that a path means, or None if it can only be a name on the hub."""
    folder = Path(path)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise UserError(f"{path} is a file: give the folder that holds config.json")
    looks_like_hub_name = not folder.is_absolute() and len(folder.parts) <= 2 and str(path)[:1] not in (".", "~")
    if not looks_like_hub_name:
        raise UserError(f"{path}: no such folder: give one with config.json, or a model's name on the hub")
    return None


def _check_config_file(file: Path) -> None:
    if not file.is_file():
        raise UserError(f"{file}: no such file: a model's folder needs its config.json")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"{file}:{error.lineno}: not valid JSON ({error.msg}): mend or replace it") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not UTF-8 text: mend or replace it") from error
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        raise UserError(f"{file}: it names no model_type: take the config.json that belongs to the model")
    family_named(content["model_type"])


def _end_token(tokenizer: PreTrainedTokenizerBase, folder: Path | None) -> str | None:
    if folder is not None and any((folder / name).is_file() for name in ("config.json", CONFIG_FILE)):
        index = load_config(folder).eos_token_id
        if isinstance(index, int):
            return cast("str | None", tokenizer.convert_ids_to_tokens(index))
    return _GPT2_END if _GPT2_END in tokenizer.get_vocab() else None


def _sentencepiece_file(folder: Path) -> Path | None:
    """The sentencepiece model of a folder that has nothing else to make its tokenizer from.

    Raises:
        UserError: a package that reads it is missing.
    """
    if (folder / "tokenizer.json").is_file():
        return None
    file = next((folder / name for name in _SENTENCEPIECE_FILES if (folder / name).is_file()), None)
    if file is not None:
        for package, module in (("sentencepiece", "sentencepiece"), ("protobuf", "google.protobuf")):
            try:
                import_module(module)
            except ImportError as error:
                raise UserError(f"{file}: reading it needs the package {package}: pip install {package}") from error
    return file


def _check_sentencepiece(tokenizer: PreTrainedTokenizerBase, file: Path) -> None:
    """Without the right tokenizer_class transformers cuts text otherwise than the model learnt it, silently."""
    from sentencepiece import SentencePieceProcessor

    try:
        model = SentencePieceProcessor(model_file=str(file))
    except (OSError, RuntimeError):  # tiktoken's files have the same name
        return
    settings = file.with_name("tokenizer_config.json")
    if settings.is_file() and json.loads(settings.read_text(encoding="utf-8")).get("add_prefix_space") is False:
        return  # asked for, though not what the model of sentencepiece says
    wanted = [model.id_to_piece(index) for index in model.encode(_SAMPLE)]
    given = tokenizer.convert_ids_to_tokens(tokenizer(_SAMPLE, add_special_tokens=False)["input_ids"])
    if given != wanted:
        raise UserError(
            f"{file}: as a {type(tokenizer).__name__} it cuts text otherwise than sentencepiece does: name the "
            "tokenizer_class it was made for in tokenizer_config.json (LlamaTokenizer reads models of type BPE), "
            "or bring its tokenizer.json"
        )


def _not_loaded(path: str | Path, what: str, error: Exception) -> UserError:
    reason = shorten(str(error) or type(error).__name__, 300, placeholder=" ...")
    where = "" if Path(path).is_dir() else " is no folder here, and the hub did not give it"
    return UserError(f"{path}{where}: its {what} cannot be loaded ({reason}): check the name, the files, the network")
