"""Writes a decoder as a GGUF file, for llama.cpp, Ollama and what else reads it, and reads it back by transformers.

A GGUF has no factors, so these are multiplied out. It stores the tokenizer too: as lists of tokens, merges and types
beside the name of a rule by which text is cut.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from jinja2 import TemplateError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from llmdistill.artifacts import new_proven_folder
from llmdistill.embedded import locate_data
from llmdistill.errors import UserError, install_command
from llmdistill.messages import logger
from llmdistill.models.chat_templates import end_of_turn
from llmdistill.models.configs import load_config
from llmdistill.models.forms import remove_forms
from llmdistill.models.gguf import gguf_file, without_bars
from llmdistill.models.load import load_model
from llmdistill.models.tokenizer import load_tokenizer
from llmdistill.progress import Activity
from llmdistill.serving.dense import Describe
from llmdistill.serving.fidelity import compare, outputs_of, read_rows
from llmdistill.students.counting import count_parameters
from llmdistill.students.install import is_factorized
from llmdistill.students.merge import merge

FILE = "model.gguf"
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",  # llama.cpp has one architecture for both
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
}
"""model_type -> architecture of GGUF, where both llama.cpp and transformers read it."""
_OF_DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
TYPES = (*_OF_DTYPES.values(), "q8_0")
_BLOCK = 32
"""Weights of a row that share a scale in q8_0."""
_PRE = {"qwen2": "qwen2", "qwen3": "qwen2"}
"""model_type -> GGUF's name of the rule by which its byte-level tokenizer cuts text, where its steps have no name."""
_SCALED_BY_WIDTH = {("gemma2", 46), ("gemma3_text", 62)}
"""model_type and layers of the Gemmas of 27 billion parameters, whose queries llama.cpp divides by the square root of
hidden_size / heads, and not of the width of a head."""
_FAR = -1e9
"""Score of a token that no merge makes, below every other one."""
_WHOLE = -1000.0
"""The score by which llama.cpp's converter writes the tokens that are found whole in a text."""
_SPACE = "▁"
"""Sentencepiece's character for a space."""
_SAMPLES = (
    "The 1,204 lamps of Orrin – are they bluer\n\tthan 77?",
    "  def f(x):\n    return {'größe': x ** 2}  # naïve",
    "Смешанный 文本 mit 🦙 и   пробелами.",
)
"""Texts that must have the same tokens in the file as in the student."""


@dataclass(frozen=True, kw_only=True)
class GgufSettings:
    """How a model is written as GGUF."""

    weights: str | None = None
    """One of TYPES; None is the type of the student's weights, which loses nothing."""
    tokenizer_file: str | None = None
    """A GGUF file, such as the teacher's, whose tokenizer and chat template are copied."""


@torch.no_grad()
def export_gguf(
    model_dir: Path | str,
    out_dir: Path | str,
    *,
    settings: GgufSettings,
    data: str | None = None,
    describe: Describe | None = None,
) -> dict[str, Any]:
    """Write a decoder as model.gguf, alone in its folder, with its tokenizer and chat template; factors are multiplied
    out, and weights of few bits become floats before.

    The file is read back by transformers and compared with the model on rows of `data`; what transformers reads
    otherwise than the model has it is a warning. `describe` adds a card.

    Returns:
        output, params, bytes, weights (the type of the matrices), largest_difference of an output, and comparison.

    Raises:
        UserError: the package gguf is missing; the architecture, a kind of positions or the tokenizer has no place in a
            GGUF that transformers reads; or `out_dir` is not empty.
    """
    # What cannot be written is refused before a model is loaded.
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise UserError(f"--to gguf needs the package gguf: {install_command('gguf')}") from error
    config = load_config(model_dir)
    if config.model_type not in ARCHITECTURES or not (config.architectures or [""])[0].endswith("ForCausalLM"):
        raise UserError(
            f"--to gguf: {model_dir} is {(config.architectures or [config.model_type])[0]}, and transformers reads no "
            f"GGUF of it; expected a decoder of {', '.join(ARCHITECTURES)}: take --to dense and llama.cpp's converter"
        )
    if settings.weights is not None and settings.weights not in TYPES:
        raise UserError(f"--to gguf: weights {settings.weights!r} does not fit; expected {', '.join(TYPES)}")
    if settings.tokenizer_file is not None and gguf_file(locate_data(settings.tokenizer_file)) is None:
        raise UserError(f"--to gguf: tokenizer_file {settings.tokenizer_file}: no GGUF file there")
    _rope(config)  # raises for positions that a GGUF has no place for

    tokenizer = load_tokenizer(model_dir)
    rows = read_rows(model_dir, data)
    with new_proven_folder(out_dir) as folder:
        model = load_model(model_dir, dtype="auto", head="saved")
        kind = settings.weights or _OF_DTYPES.get(model.dtype, "f32")
        remove_forms(model)
        if is_factorized(model):
            merge(model)
        config, params = model.config, count_parameters(model)
        _write(model, tokenizer, folder / FILE, kind, name=Path(out_dir).name, tokenizer_file=settings.tokenizer_file)
        del model
        exact = outputs_of(load_model(model_dir, dtype=torch.float32, head="saved"), rows)
        with Activity(f"Reading {FILE} back"):  # transformers parses the list of tokens four times: minutes for Gemma's
            read, differing = _read_back(folder, config)
        what = f"--to gguf: the file of {model_dir}"
        comparison = compare(exact, outputs_of(read, rows), rows, what=what)
        if differing:
            # Not the model's own config: for the file of a Mistral that is one of a Llama.
            names = ", ".join(differing)
            logger.warning(
                f"{out_dir}/{FILE}: transformers reads {names} of a GGUF otherwise than the model has them: take "
                f'AutoConfig.from_pretrained(..., gguf_file="{FILE}"), set the model\'s {names} in it, and load with '
                "config=; llama.cpp reads the file itself"
            )
        window = getattr(config, "sliding_window", None)
        if read.config.model_type != config.model_type and window and window < config.max_position_embeddings:
            logger.warning(
                f"{out_dir}/{FILE}: transformers and llama.cpp read it as a Llama, whose attention has no window: its "
                f"outputs differ from the model's after the first {window:,} tokens of a text"
            )
        for sentence in _llama_cpp_differences(config, tokenizer if settings.tokenizer_file is None else None):
            logger.warning(f"{out_dir}/{FILE}: {sentence}")
        if comparison.changed and kind != "q8_0":
            logger.warning(f"{out_dir}/{FILE} is not equal to {model_dir}: {comparison.describe()}")
        # Texts that have other tokens by the file than by the student's tokenizer
        with Activity("Reading its tokens back"):
            by_file: Callable[..., Any] = AutoTokenizer.from_pretrained(folder, gguf_file=FILE)
        texts = list(_SAMPLES)
        if tokenizer.chat_template is not None:
            turns = [{"role": "user", "content": text} for text in _SAMPLES[:1]]
            with suppress(TemplateError):  # such as one that needs a system's turn
                texts.append(str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)))
        other = next((text for text in texts if by_file(text)["input_ids"] != tokenizer(text)["input_ids"]), None)
        if other is not None:
            logger.warning(
                f"{FILE}: {other[:60]!r} has other tokens by the file than by the student's tokenizer: give the "
                "teacher's GGUF, if there is one, by --tokenizer_file"
            )
        if describe is not None:
            describe(folder, comparison.describe())
        size = (folder / FILE).stat().st_size
    return {"output": str(out_dir), "params": params, "bytes": size, "weights": kind, **comparison.result()}


def _rope(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the rotary positions of a model; of Gemma 3 those of its layers without a window."""
    rope: dict[str, Any] = dict(getattr(config, "rope_parameters", None) or {})
    rope = dict(rope.get("full_attention", rope))
    kind = rope.setdefault("rope_type", "default")
    if kind not in ("default", "linear", "yarn", "llama3"):
        raise UserError(f"--to gguf: positions of type {kind} have no place in the file: take --to dense")
    return rope


def _write(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    file: Path,
    kind: str,
    *,
    name: str,
    tokenizer_file: str | None,
) -> None:
    from gguf import GGML_QUANT_VERSION, GGUFWriter, LlamaFileType, RopeScalingType

    config: Any = model.config
    writer = GGUFWriter(file, ARCHITECTURES[config.model_type])
    # transformers takes a llama of exactly this name for a Mistral, whose tensors it then does not find.
    writer.add_name("Mistral" if name == "mistral" else name)
    writer.add_file_type(LlamaFileType.ALL_F32 if kind == "f32" else LlamaFileType[f"MOSTLY_{kind.upper()}"])
    writer.add_quantization_version(GGML_QUANT_VERSION)
    license = getattr(config, "license", None)
    if isinstance(license, str):
        writer.add_license(license)

    # Sizes, positions and what bounds the scores
    head_width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_width)
    writer.add_value_length(head_width)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    rope = _rope(config)
    writer.add_rope_dimension_count(head_width)
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(float(rope["factor"]))
        if "original_max_position_embeddings" in rope:
            writer.add_rope_scaling_orig_ctx_len(int(rope["original_max_position_embeddings"]))
    if config.model_type.startswith("gemma"):
        writer.add_sliding_window(config.sliding_window)
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, cap, None) is not None:
            getattr(writer, f"add_{cap}")(float(getattr(config, cap)))

    if tokenizer_file is None:
        _add_tokenizer(writer, tokenizer, config)
    else:
        _copy_tokenizer(writer, locate_data(tokenizer_file), tokenizer)
    with Activity(f"Writing {FILE}"):
        for tensor, array, of_weight in _tensors(model, kind):
            writer.add_tensor(tensor, array, raw_dtype=of_weight)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _tensors(model: PreTrainedModel, kind: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name, the array and the type of each weight, a tied head left out."""
    from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGMLQuantizationType, get_tensor_name_map
    from gguf.quants import quantize
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config: Any = model.config
    own = ARCHITECTURES[config.model_type]
    architecture: MODEL_ARCH = next(number for number, name in MODEL_ARCH_NAMES.items() if name == own)
    names = get_tensor_name_map(architecture, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = weight.detach().float().cpu().numpy()
        new = names.get_name(name, (".weight", ".bias"))
        if new is None:
            raise UserError(f"--to gguf: {name} has no name in a GGUF of {own}: take --to dense")
        module = name.split(".")[-2]
        if own == "llama" and module in heads:
            # llama.cpp rotates neighboring features, and transformers one of each half.
            array = array.reshape(heads[module], 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        if own.startswith("gemma") and name.endswith("norm.weight"):
            array = array + 1  # transformers multiplies by 1 + weight
        of_weight = GGMLQuantizationType.F32
        if array.ndim > 1:  # llama.cpp wants vectors in fp32
            fits = kind != "q8_0" or array.shape[-1] % _BLOCK == 0
            of_weight = GGMLQuantizationType[kind.upper() if fits else "F16"]
        yield new, quantize(array, of_weight), of_weight
    rope = _rope(config)
    if rope["rope_type"] == "llama3":
        # By these numbers llama.cpp divides the frequencies of Llama 3.1's positions.
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        yield "rope_freqs.weight", (plain / scaled.double()).float().numpy(), GGMLQuantizationType.F32


def _copy_tokenizer(writer: Any, path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Copy all that a GGUF file says of its tokenizer.

    Raises:
        UserError: its tokens are not those of the student.
    """
    from gguf import GGUFReader

    file = cast(Path, gguf_file(path))
    fields = {name: field for name, field in GGUFReader(file).fields.items() if name.startswith("tokenizer.")}
    tokens = fields["tokenizer.ggml.tokens"].contents() if "tokenizer.ggml.tokens" in fields else []
    own = tokenizer.get_vocab()
    unequal = sum(own.get(token, number) != number for number, token in enumerate(tokens))
    if not tokens or max(own.values()) >= len(tokens) or unequal:
        raise UserError(
            f"--to gguf: {file} has {len(tokens):,} tokens, of which {unequal:,} have another number in the student, "
            f"which has {len(own):,}: give the file of its own teacher, or leave tokenizer_file out"
        )
    for name, field in fields.items():
        sub_type = field.types[1] if len(field.types) > 1 else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type)


def _add_tokenizer(writer: Any, tokenizer: PreTrainedTokenizerBase, config: Any) -> None:
    """Write a tokenizer of byte-level BPE (GPT-2, Llama 3, Qwen) or of sentencepiece's BPE (Llama 2, Gemma).

    Raises:
        UserError: it is another one.
    """
    from gguf import TokenType

    saved = json.loads(cast(Any, tokenizer).backend_tokenizer.to_str())
    model, pre = saved["model"], saved.get("pre_tokenizer")
    cutters = _list_steps(pre)
    is_bytes = any(step["type"] == "ByteLevel" for step in cutters)
    if model["type"] != "BPE" or not (is_bytes or model.get("byte_fallback")):
        raise UserError(
            f"--to gguf: the tokenizer is {model['type']}, and only byte-level BPE and sentencepiece's BPE are "
            "written; give a GGUF with its tokens as tokenizer_file, such as the teacher's"
        )
    added = {token["id"]: token for token in saved["added_tokens"]}
    by_number = {number: token for token, number in model["vocab"].items()}
    by_number |= {number: token["content"] for number, token in added.items()}
    tokens = [by_number.get(number, f"[PAD{number}]") for number in range(config.vocab_size)]
    is_gemma = ARCHITECTURES[config.model_type].startswith("gemma")
    types = []
    for number, token in enumerate(tokens):
        if number not in by_number:
            types.append(TokenType.UNUSED)  # a row of padding
        elif number in added:
            types.append(TokenType.CONTROL if added[number]["special"] else TokenType.USER_DEFINED)
        elif is_gemma and len(token) > 1 and set(token) == {_SPACE}:
            types.append(TokenType.USER_DEFINED)  # transformers reads them of a GGUF as ordinary tokens
        elif token == model.get("unk_token"):
            types.append(TokenType.UNKNOWN)
        elif not is_bytes and len(token) == 6 and token.startswith("<0x"):
            types.append(TokenType.BYTE)
        else:
            types.append(TokenType.NORMAL)
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    # The file has a space between the two parts of a merge. No text gets to a merge of spaces: sentencepiece's
    # tokenizers replace them before, and find a token of spaces as an added one.
    pairs = [pair for pair in pairs if not any(" " in part for part in pair)]
    writer.add_tokenizer_model("gpt2" if is_bytes else "llama")
    cut = (_name_of_cut(cutters) or _PRE.get(config.model_type)) if is_bytes else None
    writer.add_tokenizer_pre(cut or "default")
    # llama.cpp looks for the tokens that a user of sentencepiece has defined in the text as it is, with its spaces.
    own = TokenType.USER_DEFINED
    spelled = [
        token.replace(_SPACE, " ") if is_gemma and kind == own else token
        for token, kind in zip(tokens, types, strict=True)
    ]
    writer.add_token_list(spelled)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(pair) for pair in pairs])
    if not is_bytes:
        # llama.cpp joins the pair whose token has the highest score, which is the one of the first merge.
        ranks: dict[str, int] = {}
        for rank, pair in enumerate(pairs):
            ranks.setdefault("".join(pair), rank)
        whole = {TokenType.CONTROL, TokenType.USER_DEFINED}
        writer.add_token_scores(
            [
                _WHOLE if kind in whole else -float(ranks[token]) if token in ranks else _FAR
                for token, kind in zip(tokens, types, strict=True)
            ]
        )
        steps = [*cutters, *_list_steps(saved.get("normalizer"))]
        prefix = any(step["type"] == "Prepend" or step.get("prepend_scheme", "never") != "never" for step in steps)
        writer.add_add_space_prefix(prefix)
    numbers = {
        "bos": tokenizer.bos_token_id,
        "eos": tokenizer.eos_token_id,
        "unk": getattr(tokenizer, "unk_token_id", None),
        "pad": tokenizer.pad_token_id,
    }
    end = end_of_turn(tokenizer)
    numbers["eot"] = end if end != tokenizer.eos_token_id else None
    for name, number in numbers.items():
        if number is not None and number < config.vocab_size:
            getattr(writer, f"add_{name}_token_id")(number)
    ids = tokenizer("a")["input_ids"]
    writer.add_add_bos_token(tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id])
    writer.add_add_eos_token(ids[-1:] == [tokenizer.eos_token_id])
    template = tokenizer.chat_template
    template = template.get("default") if isinstance(template, dict) else template
    if template is not None:
        writer.add_chat_template(template)


def _list_steps(step: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """Return the steps of a normalizer or a pre-tokenizer, in order."""
    if step is None:
        return []
    inner = step.get("pretokenizers", step.get("normalizers"))
    return [step] if inner is None else [part for inner_step in inner for part in _list_steps(inner_step)]


def _name_of_cut(steps: list[Mapping[str, Any]]) -> str | None:
    """Return GGUF's name of the rule by which a byte-level tokenizer cuts text; None for a rule without a name."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    *cuts, of_bytes = steps
    if of_bytes["type"] != "ByteLevel" or of_bytes.get("add_prefix_space", True):
        return None
    if of_bytes.get("use_regex", True):
        if [(step["type"], step.get("individual_digits")) for step in cuts] == [("Digits", True)]:
            return "smollm"
        return None if cuts else "gpt-2"
    if [step["type"] for step in cuts] != ["Split"]:
        return None
    names = ("llama-bpe", "qwen2", *GGUF_PRE_TOKENIZER_SPLITS)
    regex = cuts[0]["pattern"].get("Regex")
    return next((name for name in names if GGUF_PRE_TOKENIZER_SPLITS.get(name) == regex), None)


def _llama_cpp_differences(config: Any, tokenizer: PreTrainedTokenizerBase | None) -> Iterator[str]:
    """Yield where llama.cpp will differ from the model, although transformers does not.

    `tokenizer` is the one that was written; None if the file has a copied one.
    """
    if config.model_type.startswith("gemma"):
        width = config.head_dim
        if (config.model_type, config.num_hidden_layers) in _SCALED_BY_WIDTH:
            width = config.hidden_size / config.num_attention_heads
        if config.query_pre_attn_scalar != width:
            yield (
                f"llama.cpp divides the queries of this Gemma by the square root of {width:g}, and the model by that "
                f"of query_pre_attn_scalar={config.query_pre_attn_scalar:g}, so it computes other outputs"
            )
    if tokenizer is not None:
        cutters = _list_steps(json.loads(cast(Any, tokenizer).backend_tokenizer.to_str()).get("pre_tokenizer"))
        if any(step["type"] == "ByteLevel" for step in cutters) and _name_of_cut(cutters) is None:
            yield (
                "llama.cpp knows no rule that cuts text as this tokenizer does, so some texts may have other tokens "
                "there: copy the tokenizer of the teacher's GGUF, if there is one, by --tokenizer_file"
            )


def _read_back(folder: Path, config: PreTrainedConfig) -> tuple[PreTrainedModel, list[str]]:
    """Return the model of the file as transformers reads it, and the settings that it has to be told.

    Raises:
        UserError: transformers cannot read it.
    """
    from transformers import GgufConfig

    try:
        with without_bars():
            read = AutoConfig.from_pretrained(folder, gguf_file=FILE)
            own, mine = read.to_dict(), config.to_dict()
            if read.model_type != config.model_type:  # a Mistral comes back as a Llama, whose attention has no window
                del mine["sliding_window"]
            differing = sorted(name for name in _COMPARED & mine.keys() if not _equal(own.get(name), mine[name]))
            read.update({name: mine[name] for name in differing})
            model = AutoModelForCausalLM.from_pretrained(
                folder,
                gguf_file=FILE,
                dtype=torch.float32,
                quantization_config=GgufConfig(dequantize=True),
                **({"config": read} if differing else {}),
            )
    except Exception as error:  # transformers raises many types of error for what it does not know
        raise UserError(
            f"--to gguf: transformers cannot read the file ({str(error)[:200]}): take --to dense"
        ) from error
    return model, differing


_COMPARED = {
    "attention_bias",
    "mlp_bias",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "head_dim",
    "hidden_act",
    "hidden_activation",
    "hidden_size",
    "intermediate_size",
    "layer_types",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "query_pre_attn_scalar",
    "rms_norm_eps",
    "rope_parameters",
    "sliding_window",
    "tie_word_embeddings",
    "vocab_size",
}
"""Settings on which the outputs depend."""


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(value, other[name]) for name, value in one.items())
    if isinstance(one, float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=1e-6)  # the file has fp32
    return bool(one == other)
