"""What a cache comes from: its record, and the check that a cache is that of a run."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from llmdistill.artifacts import as_json, differences
from llmdistill.config.command_line import to_dict
from llmdistill.config.teacher import CacheConfig
from llmdistill.errors import UserError
from llmdistill.fingerprints import content_fingerprint, fingerprint
from llmdistill.runtime.distributed import on_every, on_main
from llmdistill.teachers.cache.folder import CacheFolder
from llmdistill.teachers.output_rows import Request
from llmdistill.teachers.source import TeacherData, TeacherModels, TeacherPlan, TeacherSource

_DATA_KEYS = ("kind", "train", "prompt", "max_length", "max_prompt_length", "long_prompts", "turns", "task")
"""Settings of the data that decide which examples there are; the others only arrange them."""
_TEXT_KEYS = ("field", "fraction", "sampling_exponent", "valid_sequences")
"""The same of data.text, for texts."""
ONLY_WHOLE = "several teachers, and one with another tokenizer, are compared by their whole distributions"


def record_of(
    plan: TeacherPlan, data: TeacherData, settings: CacheConfig, ids: np.ndarray, lengths: np.ndarray
) -> dict[str, Any]:
    """Return the record of a cache of examples with these ids and lengths, as plain JSON values."""
    return as_json(
        {
            **_origin(plan.models, data, settings.teacher),
            "model": plan.models.teachers[settings.teacher].settings.model,
            "held": {
                **Request.of(plan.method).record(),
                "top_k": settings.stored_top_k,
                "vocabulary": plan.models.compared_tokens,
            },
            "data": _data_record(plan),
            "examples": len(ids),
            "tokens": int(lengths.sum()),
            "ids": content_fingerprint(ids.tolist()),
            "settings": asdict(settings),
        }
    )


def check_cache(plan: TeacherPlan, data: TeacherData) -> None:
    """Check that a run's teacher.cache is one of its teacher, data and method, and undamaged; every rank must call it.

    Every file is read once, by one of the ranks. Raises UserError if there is no finished cache, it is that of another
    teacher, tokenizer, number format, data or method, or a file is damaged.
    """
    for name, teacher in plan.models.teachers.items():
        if teacher.settings.cache is None or plan.source is None:
            continue
        folder = on_every(partial(CacheFolder, Path(teacher.settings.cache)))
        on_main(partial(_check_origin, plan, plan.source, data, folder, name))
        folder.check_files()
        on_main(partial(_check_examples, plan, plan.source, data, folder, name))


def _check_origin(plan: TeacherPlan, source: TeacherSource, data: TeacherData, folder: CacheFolder, name: str) -> None:
    """Raises UserError if a cache is that of another teacher, tokenizer, number format, vocabulary or method."""
    record, key = folder.record, f"{plan.models.teachers[name].key}.cache {folder.folder}"
    if source.needs_whole and record["held"]["top_k"] is not None:
        raise UserError(f"{key}: it holds the most likely tokens, but {ONLY_WHOLE}; make it with hidden_states")
    remedy = "name the cache of this run, or make it with `llmdistill cache` and the settings of this run"
    expected = {**_origin(plan.models, data, name), "vocabulary": plan.models.compared_tokens}
    held = {**record, "vocabulary": record["held"]["vocabulary"]}
    if record["held"]["top_k"] is None:
        del expected["vocabulary"]  # the head has the logits of all tokens
    for what, new in expected.items():
        if held.get(what) != new:
            model = f" ({record['model']})" if what == "teacher" else ""
            raise UserError(f"{key}: its {what} is {held.get(what)}{model}, and that of this run is {new}; {remedy}")
    lacking = Request.of(plan.method).find_missing(record["held"])
    if lacking is not None:
        methods = " + ".join(plan.config.methods())
        raise UserError(f"{key}: it does not hold {lacking}, which method {methods} needs; {remedy}")


def _check_examples(
    plan: TeacherPlan, source: TeacherSource, data: TeacherData, folder: CacheFolder, name: str
) -> None:
    """Raises UserError if an example of the training set is not in a cache."""
    ids = [item.sample_id for item in source.examples(plan, data, name)[0]]
    missing = folder.find_missing(ids)
    if not missing:
        return
    why = "its data are others"
    for setting in differences(folder.record["data"], _data_record(plan))[:1]:
        why = f"{setting.key} was {setting.old} and is now {setting.new}"
    key = plan.models.teachers[name].key
    raise UserError(
        f"{key}.cache {folder.folder}: {len(missing):,} of the {len(ids):,} examples are not in it, first "
        f"the one with the id {missing[0]}; {why}: make a cache with `llmdistill cache` and the settings of this run"
    )


def _origin(models: TeacherModels, data: TeacherData, name: str) -> dict[str, Any]:
    """Return what the outputs of a teacher depend on, besides the examples."""
    teacher = models.teachers[name]
    tokenizer = data.teacher_tokenizer() if models.translates else data.tokenizer
    return {
        "teacher": fingerprint(teacher.path),
        "tokenizer": content_fingerprint(sorted(tokenizer.get_vocab().items())),
        "dtype": str(teacher.dtype).removeprefix("torch."),
    }


def _data_record(plan: TeacherPlan) -> dict[str, Any]:
    """Return what decides which examples there are."""
    values = to_dict(plan.config)
    settings = {f"data.{key}": values["data"][key] for key in _DATA_KEYS}
    if values["data"]["kind"] == "text":
        text = values["data"]["text"]
        settings |= {"data.valid": values["data"]["valid"], **{f"data.text.{key}": text[key] for key in _TEXT_KEYS}}
        # The seed draws the documents of a fraction.
        settings |= {"seed": values["seed"]} if text["fraction"] < 1 else {}
    return settings | {f"content of {key}": content for key, content in plan.data_contents().items()}
