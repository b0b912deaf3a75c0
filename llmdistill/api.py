"""The Python API: compress, distill, evaluate and export models, given in memory or by name.

A model is a transformers `PreTrainedModel`, a folder, a name on the Hub, or `embedded:teacher`. Data are rows (a list
of dicts, a `datasets.Dataset`, a `pandas.DataFrame`), texts, chats, a path, or a name: see
`llmdistill.data.memory.rows_in_memory`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from llmdistill.artifacts import new_proven_folder, read_record
from llmdistill.batch import Batch
from llmdistill.config import DataConfig, FactorizeConfig, GenerationConfig, RunConfig, StudentConfig, TaskConfig
from llmdistill.config.command_line import with_values
from llmdistill.config.data import LIMITS
from llmdistill.data.instruct import Limits
from llmdistill.data.memory import has_columns
from llmdistill.data.references import TEACHER
from llmdistill.data.sources import Data, DataKind, examples_of, kind_of
from llmdistill.data.whole_text import WholeText
from llmdistill.embedded import locate
from llmdistill.errors import UserError, check_name
from llmdistill.models.configs import load_config
from llmdistill.models.families import is_causal, max_positions
from llmdistill.models.load import load_model
from llmdistill.report.metrics_log import read_metrics_log
from llmdistill.runtime.distributed import World, init_distributed, on_main
from llmdistill.runtime.terminal import guest, quiet_libraries
from llmdistill.serving.export import Target, export_student
from llmdistill.students.convert import compress_in_place, compress_model
from llmdistill.students.search import needs_search, search
from llmdistill.students.sizes import check_factorization, summarize
from llmdistill.students.start.weighted import check_calibration_data
from llmdistill.tasks import is_task
from llmdistill.tasks.base import LoadedModel
from llmdistill.tasks.benchmark import find_shared_benchmark, score_task
from llmdistill.tasks.distance import Distance, compare_rows, cut_to_tokens, read_rows, sample_texts
from llmdistill.tasks.instruction_scores import encode_sets, score_sets
from llmdistill.tasks.text import score_masked
from llmdistill.tasks.text_windows import WindowSizes, cut_windows, score_windows
from llmdistill.training.calibration import DataOutsideRuns, measure_weights_on, split_calibration
from llmdistill.training.defaults import settle_compress
from llmdistill.training.inputs import Model, RunInputs, check_model_types, device_for, evaluation_mode, tokenizer_of
from llmdistill.training.plan import make_plans
from llmdistill.training.provenance import save_compressed
from llmdistill.training.run_folder import METRICS_FILE
from llmdistill.training.written_data import calibration_file, with_written_data

__all__ = ["Distilled", "compress", "distill", "evaluate", "export", "sizes"]


def _with_dotted(keywords: dict[str, Any], *sections: str) -> dict[str, Any]:
    """Return settings by name, where `settings` among them may hold some by the dotted keys of the command line.

    Raises UserError if a setting is given twice, or `settings` is no mapping.
    """
    plain = {key: value for key, value in keywords.items() if key != "settings"}
    dotted = keywords.get("settings") or {}
    if not isinstance(dotted, Mapping):
        raise UserError(f"settings is a {type(dotted).__name__}: give a dict, such as {{'teacher.dtype': 'bf16'}}")
    for key, value in dotted.items():
        name = next((key.removeprefix(section) for section in sections if key.startswith(section)), key)
        if name in plain and plain[name] is not None and plain[name] != value:
            raise UserError(f"{name} is given twice, as {plain[name]} and {value}: leave one of them out")
        plain[name] = value
    return plain


def compress(
    model: Model,
    *,
    rank: int | None = None,
    method: Literal["svd", "kronecker"] = "svd",
    output: str | Path | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    device: torch.device | str | None = None,
    calibration: Data | Mapping[str, Any] | None = None,
    lost: dict[str, tuple[float, float]] | None = None,
    distance: list[Distance] | None = None,
    **settings: Any,
) -> PreTrainedModel:
    """Factorize a model: replace each linear in its layers by a product of two smaller ones (MaKD §3.1, KroneckerBERT).

        student = llmdistill.compress(model, rank=48)
        student.save_pretrained("student")  # AutoModelForCausalLM.from_pretrained("student") loads it

    A weighting keeps what matters for data: it gives far better students of the same size. Without calibration data
    this is the plain SVD; the command `llmdistill compress` has a decoder write its own.

        student = llmdistill.compress(model, target_params="40%", weighting="gradients", allocation="loss",
                                      calibration=rows)

    Args:
        model: a dense model with any head. A model in memory is not changed: the student is a copy.
        rank: the rank of every linear, for svd. Without it, target_params or ranks sets the sizes; kronecker takes
            target_params or shapes.
        method: low-rank (svd) or Kronecker products.
        output: a new folder, in which the student and the model's tokenizer are saved.
        tokenizer: the tokenizer to save in `output`; by default that of the folder or name the model was loaded from.
        device: the device that decomposes the matrices; by default a model's own, and for a named one the GPU if any.
        calibration: the data of a weighting: rows of instructions, texts, a file or a name, or "teacher" for what the
            model writes itself; or a mapping of these `data` and other fields of
            `llmdistill.config.CalibrationConfig`, such as examples and seed.
        lost: a dict that is given what each matrix W loses in its product W', by its name: the squared Frobenius norms
            of W - W' and of W. `llmdistill.students.reconstruction.by_kind` sums them over the kinds of matrices.
        distance: a list that is given how far the student of a decoder is from the model, on held-out calibration data,
            or without any on texts that the model samples.
        settings: fields of `llmdistill.config.FactorizeConfig`: target_params ("62%", "0.69B", a number), ranks
            ({"*.q_proj": 32}), embedding_rank, sigma, form, weighting, allocation, rank_multiple, shapes, sums, ...
            And for calibration data prompt, max_prompt_length, max_length and long_prompts of `DataConfig`. Or as
            `settings` by the keys of a run: `{"student.factorize.target_params": "62%"}`.

    Returns:
        The student, with the model's class, dtype and device. `save_pretrained` and `from_pretrained` support it.

    Raises:
        UserError: a setting does not exist, or does not fit the model or the other settings; the model is already
            factorized; the output folder is not empty.
    """
    check_model_types(model=model)
    # The method may come by its dotted key too, which is cut to `method` here.
    settings = _with_dotted({"rank": rank, **settings}, "student.factorize.", "factorize.", "student.", "data.")
    rank, method = settings.pop("rank"), settings.pop("method", method)
    limits = {key: settings.pop(key) for key in LIMITS if key in settings}
    data, of_data = split_calibration(calibration)
    chosen = with_values(FactorizeConfig(), {"rank": rank, **settings, **of_data}, key="")
    check_factorization(chosen, method)
    config = model.config if isinstance(model, PreTrainedModel) else load_config(locate(str(model)))
    is_compared = distance is not None and is_causal(config)
    length = limits.get("max_length", DataConfig().max_length)
    chosen = settle_compress(chosen, method, config, has_data=data is not None, max_length=length)
    made_by = StudentConfig(method=method, factorize=chosen)
    check_calibration_data(chosen.weighting, data)
    if isinstance(data, str) and data == TEACHER:
        data = calibration_file(model, chosen.calibration)
    if limits and data is None:
        raise UserError(f"data.{next(iter(limits))} is for calibration data: give them, or leave it out")
    with nullcontext() if output is None else new_proven_folder(output) as folder:
        named = not isinstance(model, PreTrainedModel)
        source = locate(str(model)) if named else None
        teacher = load_model(source, dtype="auto", head="saved") if source is not None else cast(PreTrainedModel, model)
        on, origin, weighted = device_for(model, device), source if tokenizer is None else None, None
        held_out: Sequence[Batch] = ()
        if chosen.is_weighted and data is not None:
            words = LoadedModel(model=teacher, tokenizer=tokenizer_of(model, tokenizer))
            given = DataOutsideRuns(data=data, limits=limits, needs_held_out=is_compared)
            weighted, held_out = measure_weights_on(given, words, made_by, on, origin)
        texts = cut_to_tokens(held_out or sample_texts(teacher)) if is_compared else []
        theirs = read_rows(teacher, texts, "teacher") if texts else []
        student = teacher
        # A model that was loaded here is nobody else's, so it needs no copy.
        if named:
            compress_in_place(student, chosen, method, device=on, weighted=weighted, lost=lost)
        else:
            student = compress_model(teacher, chosen, method, device=on, weighted=weighted, lost=lost)
        if is_compared and distance is not None:
            distance.append(compare_rows(theirs, read_rows(student, texts, "student")))
        if folder is not None:
            save_compressed(student, tokenizer, folder, model, made_by, Path(str(output)).name)
    return student


def sizes(
    model: Model,
    *,
    rank: int | None = None,
    method: Literal["svd", "kronecker"] = "svd",
    device: torch.device | str | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Compute the size of the student that `compress` makes with the same arguments, from the model's config alone.

        print(llmdistill.sizes(model, rank=48)["ratio"])

    Only kronecker with target_params reads the weights, because it searches the shapes with the smallest error; this
    search runs on `device`.

    Returns:
        teacher_params, student_params, their ratio and more (see `students.sizes.summarize`); after a search also the
        `candidates`, best first, and the `settings` with which `compress` makes the best one.

    Raises:
        UserError: as in `compress`.
    """
    check_model_types(model=model)
    settings = _with_dotted({"rank": rank, **settings}, "student.factorize.", "factorize.", "student.")
    method = settings.pop("method", method)
    chosen = with_values(FactorizeConfig(), settings, key="")
    source = model if isinstance(model, PreTrainedModel) else locate(str(model))
    candidates = search(source, chosen, device=device_for(model, device)) if needs_search(chosen, method) else []
    chosen = candidates[0].settings if candidates else chosen
    result = summarize(source.config if isinstance(source, PreTrainedModel) else source, chosen, method)
    rows = [candidate.row() for candidate in candidates]
    return {**result, "settings": rows[0]["settings"], "candidates": rows} if rows else result


def export(
    student: Model,
    output: str | Path,
    *,
    to: str = "dense",
    int8: bool = False,
    tokenizer: PreTrainedTokenizerBase | None = None,
    data: str | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Write a student for programs that have no llmdistill, or with weights of few bits.

        llmdistill.export(student, "graph", to="onnx", int8=True)
        llmdistill.export(student, "small", to="int4", group_size=64)

    Args:
        student: a factorized student; for ONNX, GGUF and few bits any model. A student in memory is not changed.
        output: a new folder. It gets its name when it has been loaded again.
        to: dense is a stock Hugging Face model; onnx keeps the factors; gguf is a file for llama.cpp; int8 and int4
            round the layers' linears. Forms of other packages (llmdistill.forms) add their own.
        int8: with onnx, also a file of int8 matrices.
        tokenizer: the tokenizer of a student in memory; by default that of the folder it was loaded from.
        data: rows on which the outputs are compared with the student's, as `evaluate` reads them; by default rows of
            this package.
        **settings: of the form, as a run has them: group_size, packed and embeddings for int8 and int4; weights and
            tokenizer_file for gguf (see `serving.gguf_export.GgufSettings`).

    Returns:
        output, params (the number of parameters), largest_difference of an output, comparison (the figures of
        `serving.fidelity.Comparison`, and text), and more for ONNX and few bits.

    Raises:
        UserError: the student does not suit, a package is missing, or `output` is not empty.
    """
    check_model_types(student=student)
    target = Target(to=to, int8=int8, settings=settings)
    return export_student(student, output, target, tokenizer=tokenizer, data=data)


@dataclass(frozen=True, kw_only=True)
class Distilled:
    """The result of `distill`."""

    student: PreTrainedModel
    """The trained student, in evaluation mode."""
    metrics: dict[str, Any]
    """metrics.json of the run: the scores of the teacher, the untrained and the trained student, and the cost."""
    history: list[dict[str, float]]
    """metrics.jsonl of the run: the loss, each of its terms and the speed, logged every `log_every` steps."""
    folder: Path
    """The run's folder: report.md, run.json, checkpoints, and the student with its tokenizer in `student/`."""
    config: RunConfig
    """All settings of the run."""


def distill(
    teacher: Model,
    student: Model | None,
    data: Data,
    method: str = "makd",
    *,
    valid: Data | None = None,
    tests: Mapping[str, Data] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    ds_config: str | Path | Mapping[str, Any] | None = None,
    output_dir: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    callbacks: Sequence[Callable[[Any], Any]] = (),
    **keywords: Any,
) -> Distilled:
    """Train a student to imitate its teacher; this is the run of `llmdistill train` in the current process.

        student = llmdistill.compress(teacher, rank=48)
        result = llmdistill.distill(teacher, student, rows, method="makd", steps=200, learning_rate=5e-4)
        print(result.history[-1]["loss"], result.folder / "student")  # which has the tokenizer too

    Under a launcher (`deepspeed`, `torchrun`) every rank must call this function, and the run trains on all ranks.
    Models in memory are not changed; they are saved to `output_dir/inputs`, and the run reads them from there.

    Args:
        teacher: the model to learn from.
        student: the model to train; with None the run creates one from the teacher, according to the settings
            (`settings={"student.factorize.rank": 48}` or `{"student.shape": "6x384x12"}`).
        data: rows with instruction, input and output, with prompt and completion, or with messages; chats, which are
            lists of messages; or texts; or "teacher" for what the teacher writes itself.
        method: makd, kd, minilm, minilmv2, distilbert, tinybert, kroneckerbert, embedding, sft or seqkd.
        valid: the validation set, whose loss is logged; instructions are also scored on it by ROUGE-L.
        tests: instruction sets by name, on which all models are scored (see the settings `scoring.*`).
        tokenizer: the tokenizer of teacher and student; by default that of the folders or names of the models.
        ds_config: a DeepSpeed configuration, as a file or a dict; by default ZeRO-2 in the dtype of the run.
        output_dir: the run folder; the same call with the same folder resumes an interrupted run. By default the run
            uses a new temporary folder, which is not deleted, and saves no checkpoints.
        settings: any setting by dotted key, as on the command line:
            `{"train.micro_batch_size": 8, "teacher.dtype": "bf16"}`.
        callbacks: functions or classes that make a callback of the training from its trainer (docs/extending.md).
        keywords: settings of the run, of training, of data or of the method by name: steps, learning_rate,
            global_batch_size, max_length, seed, temperature (kd) ...

    Returns:
        The trained student and the measurements of the run.

    Raises:
        UserError: a setting, a model or a row is invalid, or the training cannot go on.
    """
    from llmdistill.studies.distillation import run_chain  # the other functions need no libraries of training

    check_model_types(teacher=teacher, **({} if student is None else {"student": student}))
    given = RunInputs(teacher, student, data, valid, dict(tests or {}), tokenizer, ds_config)
    config = given.make_config({**(settings or {}), "method": method}, keywords, output_dir)
    with guest():
        world = init_distributed(given.command(method))
        if config.tasks.names or method == "none":
            raise UserError("distill trains a student and no more: for tasks.names or method none start the main job")
        # Rank 0 saves the models and rows in memory; every rank goes on with their paths.
        config = with_written_data(on_main(lambda: given.save(config)))
        quiet_libraries()
        plans = make_plans(config)
        run_chain(plans, plans[0].task.read_on_all(plans[0].models), callbacks=callbacks)
        folder = Path(str(config.output_dir))
        trained = load_model(folder / "student", dtype="auto", device=world.device, head="saved")
    return Distilled(
        student=trained.eval(),
        metrics=dict(read_record(folder / METRICS_FILE, remedy="call it again") or {}),
        history=read_metrics_log(folder),
        folder=folder,
        config=config,
    )


def evaluate(
    model: Model,
    data: Data | Mapping[str, Data],
    *,
    kind: DataKind | Literal["task"] | None = None,
    data_dir: str | Path | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    output: str | Path | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Score a model: ROUGE-L of its answers, its cross-entropy and perplexity on a text, or the metrics of a task.

        scores = llmdistill.evaluate(model, rows)
        print(scores["rougeL"])

    Args:
        model: a decoder; for text also an encoder with a masked-language-model head; for a task a model that is
            fine-tuned on it (`llmdistill evaluate --suite glue` fine-tunes).
        data: rows of instructions, texts, or the name of a task such as "rte"; or several such sets by name.
        kind: instructions, text or task; by default it follows from the name, the first row or the extension (.txt).
        data_dir: for tasks, the folder of their own download; by default the data set on the Hub.
        tokenizer: the tokenizer of a model in memory; by default that of the folder or name it was loaded from.
        output: the folder for the predictions, with one file per set.
        settings: fields of `llmdistill.config.GenerationConfig` (decoding, seeds, limit, batch_size,
            no_repeat_ngram_size, window, stride), and prompt, max_prompt_length, max_length and long_prompts of
            `DataConfig`; tasks use batch_size and max_length, by default 128, or 384 for question answering. A text has
            windows of `window` tokens, else of at most max_length.

    Returns:
        For instructions ``{"rougeL": 0-100, "per_seed", "std", "examples", "tokens_per_second", ...}``, for text
        ``{"loss": nats per token, "perplexity", "tokens"}``, for a task ``{"dev": {COLUMN: {METRIC: 0-100}}, "score":
        the main metric, "chance": that of the best constant answer}``; for several sets one such dict per name.

    Raises:
        UserError: a setting does not exist, data are empty or malformed, or the model has no classifier for a task.
    """
    check_model_types(model=model)
    settings = _with_dotted(settings, "scoring.", "data.")
    limits = {key: settings.pop(key) for key in LIMITS if key in settings}
    generation = with_values(GenerationConfig(), settings, key="")
    own = tokenizer_of(model, tokenizer)
    sets, are_several = {"data": data}, isinstance(data, Mapping) and not has_columns(data)
    if isinstance(data, Mapping) and are_several:
        sets = {str(name): data_set for name, data_set in data.items()}
    kinds: dict[str, str] = {}
    for name, data_set in sets.items():
        check_name(name, "data")  # its predictions are kept under it
        # A file or folder with the name of a task is the user's own data.
        is_named = isinstance(data_set, str) and is_task(data_set) and not os.path.exists(data_set)
        kinds[name] = kind or ("task" if is_named else kind_of(data_set, name=name))
    folder = None if output is None else Path(output)
    if "task" in kinds.values():
        if set(kinds.values()) != {"task"}:
            raise UserError("data holds tasks and other sets, which need different heads: evaluate them one by one")
        scored = find_shared_benchmark(str(task) for task in sets.values())
        # The config requires a name; that of each task replaces it below.
        places = TaskConfig(name="rte", dir=None if data_dir is None else str(data_dir))
        usual = DataConfig(kind="task", task=places, max_length=scored.usual_length)
        # Of the limits only max_length means something for a task.
        usual = replace(usual, max_length=with_values(usual, limits, key="").max_length)
        with evaluation_mode(model, head=scored.head) as loaded:
            scores: dict[str, Any] = {
                name: score_task(
                    loaded,
                    own,
                    replace(usual, task=replace(places, name=str(task))),
                    batch_size=generation.batch_size,
                    predictions=None if folder is None else folder / name,
                )
                for name, task in sets.items()
            }
        return scores if are_several else dict(scores["data"])
    texts = {name: data for name, data in sets.items() if kinds[name] == "text"}
    examples = {name: examples_of(data, name=name) for name, data in sets.items() if name not in texts}
    # Any name stands for the set, because the default of `train` is the embedded example, which is no text.
    limited = with_values(DataConfig(kind="instructions" if examples else "text", train="data"), limits, key="")
    if examples:
        answering = Limits.of(limited, [own])
        encode_sets(examples, own, generation, answering)
    size, length, window = generation.batch_size, limits.get("max_length", limited.max_length), generation.window
    read = {
        name: WholeText(text).read() for name, text in texts.items()
    }  # a missing file is an error before anything is loaded
    scores = {}
    # In a distributed program of the user, every rank scores its own model: no rank waits for another.
    with evaluation_mode(model, head="lm_head") as loaded, World.alone().entered():
        for name, text in texts.items():
            if is_causal(loaded.config):
                # The default window is no longer than the text and the model; one that was asked for is not changed.
                most = length if "max_length" in limits else max_positions(loaded.config, length)
                windows_of_text = WindowSizes(
                    window or most, generation.stride, generation.limit, shorten=window is None
                )
                windows = cut_windows(read[name], own, loaded.config, windows_of_text, name=name, data=text)
                scores[name] = score_windows(loaded, windows, batch_size=size, name=name)
            else:
                scores[name] = score_masked(loaded, own, text, max_length=length, batch_size=size)
        if examples:
            loaded_model = LoadedModel(model=loaded, tokenizer=own)
            scores |= score_sets(loaded_model, examples, generation, answering, predictions_dir=folder)
    return {name: scores[name] for name in sets} if are_several else dict(scores["data"])
