"""Writes the model card of a student: the README.md that the hub shows, with its header of YAML.

A card says nothing of the machine: paths are cut to the last name. It belongs to the user, so it is no part of the
folder's manifest, and one without the comment of `_COMMENT` is never written again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import PreTrainedConfig

from llmdistill.artifacts import CARD, PLACE
from llmdistill.data.prompts import CHAT, MINILLM, PROMPT_WITH_INPUT, PROMPT_WITHOUT_INPUT, recorded_prompt
from llmdistill.embedded import locate
from llmdistill.files import read_json, write_text
from llmdistill.models.configs import load_config, local_folder
from llmdistill.models.forms import saved_form
from llmdistill.models.gguf import RECORD, origin
from llmdistill.models.heads import HEADS
from llmdistill.models.tokenizer import has_tokenizer, load_tokenizer
from llmdistill.report.pages import render
from llmdistill.report.tables import TitledTable
from llmdistill.students.counting import build_reference, count_parameters
from llmdistill.students.hub import NAME

USE = "## How to load it"
"""Heading of the last part of a card, which is another one for an export."""
_COMMENT = (
    "<!-- Written by llmdistill, which writes it again when the same command scores the student again. Complete it, "
    "and remove this comment to keep your text. -->"
)
_DECODERS = {
    "ForCausalLM": ("text-generation", "AutoModelForCausalLM"),
    "LMHeadModel": ("text-generation", "AutoModelForCausalLM"),
}
"""How the name of a decoder's architecture ends -> its `pipeline_tag` on the hub, and the class that loads it."""
_IN_CACHE = re.compile(r"/models--([^/]+)/snapshots/")  # of the hub's cache: models--USER--NAME
# An absolute path, or one after ~ or C:, at the start of a word; // is part of an address.
_MACHINE_PATH = re.compile(r"(?<![^\s='\"(\[{,:])(?:~|[A-Za-z]:)?/(?!/)[^\s'\"()\[\]{},]*")
_LONGEST = 300
"""Largest number of characters of a value from the teacher's card."""
_UNREADABLE = (OSError, ValueError, TypeError, AttributeError, yaml.YAMLError)
"""Exceptions of reading somebody else's card, or one on the hub without a network."""
_GENERIC = ("student", "untrained", "")
"""Names of folders in a run's folder that tell nothing."""


def without_paths(text: str) -> str:
    """Cut each absolute path in a text to its last name."""
    return _MACHINE_PATH.sub(lambda path: _last_name(path[0]), text)


def _last_name(path: str) -> str:
    parts = [part for part in path.split("/") if part]
    last = parts[-1] if parts else ""
    return parts[-2] if last in _GENERIC and len(parts) > 1 else last


@dataclass(frozen=True, kw_only=True)
class TeacherFacts:
    """What a card says of the model that a student was made from."""

    name: str
    params: int
    hub: str | None = None
    """Its name on the hub, or of the model that its own card gives as its base."""
    header: Mapping[str, Any] = field(default_factory=dict)
    """Its license (`license`, `license_name`, `license_link`) and `language`, as far as its card or config says so."""
    origin: str | None = None
    """How its weights were made, if they are those of a GGUF file."""

    @classmethod
    def of(cls, reference: str, config: PreTrainedConfig, params: int) -> TeacherFacts:
        """Describe the model of a folder, a name on the hub, or a name of its own such as embedded:teacher."""
        if reference.startswith("embedded:"):
            return cls(name=reference, params=params)
        folder = local_folder(locate(reference))
        dequantized_from = None if folder is None else origin(folder)
        cached = None if folder is None else _IN_CACHE.search(f"{folder.absolute().as_posix()}/")
        hub = reference if folder is None else None if cached is None else cached[1].replace("--", "/", 1)
        values = {
            "license": getattr(config, "license", None),
            **_read_header(reference if folder is None else folder / CARD),
        }
        header = {key: values.get(key) for key in ("license", "license_name", "license_link", "language")}
        header = {key: value for key, value in header.items() if _is_text(value)}
        base = hub or (values["base_model"] if _is_text(values.get("base_model")) else None)
        name = hub or _last_name(reference)
        if dequantized_from is not None and folder is not None:
            name = read_json(folder / RECORD)["file"]
        return cls(name=name, params=params, hub=base, header=header, origin=dequantized_from)


def _is_text(value: object) -> bool:
    """Return whether a value of somebody else's header is a line of text, or a list of such lines."""
    if isinstance(value, list):
        return bool(value) and all(isinstance(line, str) and _is_text(line) for line in value)
    return isinstance(value, str) and value.isprintable() and len(value) <= _LONGEST


def _read_header(card: str | Path) -> dict[str, Any]:
    """Return the header of a card, by its file or a name on the hub; an empty one if it cannot be read."""
    if isinstance(card, Path) and not card.is_file():
        return {}
    try:
        return dict(ModelCard.load(card, ignore_metadata_errors=True).data.to_dict())
    except _UNREADABLE:
        return {}


@dataclass(frozen=True, kw_only=True)
class StudentFacts:
    """What a card says of the student and of its training."""

    intro: str
    tags: Sequence[str]
    made: Sequence[tuple[str, str]]
    datasets: Sequence[str] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Those that differ from the defaults, nested as in a recipe."""
    scores: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """By set and metric."""
    table: TitledTable | None = None
    legend: str = ""
    warnings: Sequence[str] = ()


def write_card(folder: Path, title: str, teacher: TeacherFacts, story: StudentFacts) -> None:
    """Write the card of a student's folder, unless the user has taken over the one that is there."""
    file = folder / CARD
    if file.is_file() and _COMMENT.encode() not in file.read_bytes():
        return
    config = load_config(folder)
    pipeline, _ = _find_task(folder, config)
    factors, form = _describe_factors(config), saved_form(config)
    params = count_parameters(build_reference(config))
    title, scores = _without_line_breaks(title), []
    for name, values in ((_without_line_breaks(name), values) for name, values in story.scores.items()):
        kind = re.sub(r"[^\w/.-]+", "-", name).lower()
        scores += [EvalResult(pipeline, kind, name, metric, round(value, 4)) for metric, value in values.items()]
    data = ModelCardData(
        **teacher.header,
        base_model=teacher.hub,
        library_name=_library_name(folder, config),
        pipeline_tag=pipeline,
        tags=["llmdistill", *map(_without_line_breaks, story.tags)],
        datasets=list(map(_without_line_breaks, story.datasets)) or None,
        model_name=title if story.scores else None,  # the hub's header has no results without it
        eval_results=scores or None,
    )
    text = config.get_text_config()
    sizes = (("layers", "num_hidden_layers"), ("wide", "hidden_size"), ("tokens", "vocab_size"))
    known = [f"{getattr(text, key):,} {what}" for what, key in sizes if isinstance(getattr(text, key, None), int)]
    license = teacher.header.get("license_name") or teacher.header.get("license")
    license_note = (
        "its license is not known here" if license is None else f"its license, {license}, holds for the student too"
    )
    model = {
        "Architecture": ", ".join([(config.architectures or [type(config).__name__])[0], *known]),
        "Factors": factors,
        "Form": None if form is None else f"{form.saved_as(config.quantization_config)}, by {form.package}",
        "Parameters": f"{params:,}, {params / teacher.params:.0%} of the {teacher.params:,} of {teacher.name}",
        "Made from": f"{teacher.name}{'' if teacher.origin is None else f', {teacher.origin}'}; {license_note}",
    }
    prompt = None
    if pipeline == "text-generation" and has_tokenizer(folder):
        # That of its training, else its chat template.
        tokenizer = load_tokenizer(folder)
        prompt = recorded_prompt(tokenizer) or (CHAT if tokenizer.chat_template is not None else None)
    recipe = yaml.safe_dump(dict(story.settings), sort_keys=False, allow_unicode=True) if story.settings else ""
    body = render(
        "card.md.j2",
        comment=_COMMENT,
        title=title,
        intro=story.intro,
        model=[(name, value) for name, value in model.items() if value is not None],
        made=[(name, without_paths(value)) for name, value in story.made],
        recipe=without_paths(recipe).rstrip(),
        table=story.table,
        legend=story.legend,
        warnings=[without_paths(warning) for warning in story.warnings],
        prompt=prompt,
        prompts={"chat": CHAT, "minillm": MINILLM, "without": PROMPT_WITHOUT_INPUT, "with": PROMPT_WITH_INPUT},
        use=_render_use(folder, config),
    )
    write_text(file, str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}\n")))


def _without_line_breaks(text: str) -> str:
    """Return a text in one line."""
    # A line of three dashes in a value would end the YAML header of the card.
    return " ".join(text.split())


def write_export_card(student: Path, folder: Path, difference: str, *, to: str, description: str = "") -> None:
    """Write the card of an export: that of the student's folder, if one can be read there, with another way to load it.

    `difference` says in words how its outputs differ from the student's, and `description` what its form says of
    itself.
    """
    if not (student / CARD).is_file():
        return
    how = {
        "gguf": "This is the student as a GGUF, with its factors multiplied out, of which the format has none.",
        "onnx": "This is the ONNX of the student, with its factors kept.",
        "dense": "This is the student with its factors multiplied out: a stock model of the teacher's size and speed.",
    }.get(to, f"This is the student{description}.")
    try:
        card = ModelCard.load(student / CARD, ignore_metadata_errors=True)
    except _UNREADABLE:
        return
    # A folder with a GGUF has no config.json, which would make it a model of safetensors.
    config = load_config(student if to == "gguf" else folder)
    card.data.library_name = to if to in ("onnx", "gguf") else _library_name(folder, config)
    before_use, _, _ = card.text.partition(USE)
    title, line, rest = before_use.partition("\n\n## What it is")
    card.text = f"{title} {how} Compared with the student {difference}. "
    card.text += f"What follows is of the student.{line}{rest}{_render_use(folder, config, to=to)}\n"
    write_text(folder / CARD, str(card))


def _find_task(folder: Path, config: PreTrainedConfig) -> tuple[str, str]:
    name = (config.architectures or [""])[0]
    if (folder / "modules.json").is_file():
        return "sentence-similarity", "SentenceTransformer"
    of_heads = ((ending, (head.pipeline_tag, head.auto_class)) for head in HEADS.values() for ending in head.endings)
    tags = chain(_DECODERS.items(), of_heads)
    return next((task for ending, task in tags if name.endswith(ending)), ("feature-extraction", "AutoModel"))


def _render_use(folder: Path, config: PreTrainedConfig, *, to: str = "") -> str:
    _, name = _find_task(folder, config)
    factorized = _is_factorized(config)
    form = saved_form(config)
    return render("card_use.md.j2", heading=USE, name=name, factorized=factorized, form=form, to=to, place=PLACE)


def _is_factorized(config: PreTrainedConfig) -> bool:
    return (getattr(config, "quantization_config", None) or {}).get("quant_method") == NAME


def _library_name(folder: Path, config: PreTrainedConfig) -> str:
    """Return the library that loads a model, for which the hub shows lines of code."""
    if _is_factorized(config):  # the lines for transformers alone would fail
        return "llmdistill"
    return "sentence-transformers" if (folder / "modules.json").is_file() else "transformers"


def _describe_factors(config: PreTrainedConfig) -> str | None:
    if not _is_factorized(config):
        return None
    values: dict[str, Any] = config.quantization_config
    sizes = list(values["modules"].values())
    embedding = next((values[key] for key in ("embedding_rank", "embedding_columns") if values.get(key)), None)
    if not sizes and embedding is None:  # a form without factors, such as packed weights of few bits
        return None
    of_ranks = all(isinstance(size, int) for size in sizes) and bool(sizes)
    ranks = "" if not of_ranks else f" of rank {min(sizes)}" + (f" to {max(sizes)}" if len(set(sizes)) > 1 else "")
    kind = {"kronecker": "Kronecker products", "pivoted": "low-rank products with pivots"}.get(
        values["method"], "low-rank products"
    )
    text = f"{len(sizes)} matrices as {kind}{ranks}"
    return text if embedding is None else f"{text}, the token embedding too ({embedding})"
