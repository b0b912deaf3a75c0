"""A teacher's outputs in a file: the losses of the live teacher, what is refused, and what damage says."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import BertConfig, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from llmdistill.batch import IGNORE_INDEX, POSITIONS, Batch
from llmdistill.config.cache import CacheConfig
from llmdistill.config.command_line import parse_run
from llmdistill.config.machine import MachineConfig
from llmdistill.data.sampler import Share
from llmdistill.embedded import locate
from llmdistill.errors import UserError
from llmdistill.files import write_json
from llmdistill.methods import METHODS
from llmdistill.models.load import load_model
from llmdistill.models.tokenizer import load_tokenizer
from llmdistill.run import cache
from llmdistill.run.artifacts import run_record
from llmdistill.run.assemble import make_teacher
from llmdistill.run.forecast.cached import PositionCounts
from llmdistill.run.forecast.caching import CacheAsked, forecast_making, trace_making
from llmdistill.run.forecast.layout import Sizes
from llmdistill.run.forecast.step import build_models
from llmdistill.run.plan import Plan, make_plan
from llmdistill.run.wiring import request_of, tapped
from llmdistill.runtime.distributed import World
from llmdistill.teacher import cache_folder, shards
from llmdistill.teacher.cache_folder import CacheFolder, read_cache_record
from llmdistill.teacher.cached import CachedTeacher

from stand_in_vllm import install

ROOT = Path(__file__).resolve().parents[3]
WORLD = World(rank=0, size=1, device=torch.device("cpu"))
SMALL = CacheConfig(micro_batch_size=3, shard_tokens=150)
TOP_K = CacheConfig(content="top_k", top_k=20, micro_batch_size=4)


def model(folder: Path, seed: int, kind: type[Any] = LlamaForCausalLM) -> Path:
    """A tiny Llama with random weights and the embedded tokenizer."""
    source = locate("embedded:teacher")
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig.from_pretrained(source).to_dict() | sizes | {"num_key_value_heads": 2, "head_dim": 8}
    kind(LlamaConfig(**config | {"initializer_range": 0.2})).save_pretrained(folder)
    load_tokenizer(source).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("files")
    rows = [{"instruction": f"Count {n}.", "output": " ".join("abcdefgh"[: n % 8 + 1])} for n in range(25)]
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in [*rows, rows[0]]), encoding="utf-8")  # one comes twice
    return {"teacher": model(folder / "teacher", 0), "student": model(folder / "student", 1), "data": data}


@pytest.fixture(scope="module")
def planned(files):
    """A plan with these settings, and its data."""

    def make(*arguments: str) -> tuple[Plan, Any]:
        words = ["--recipe", "quickstart", "--ds_config", "zero2", "--data.train", str(files["data"])]
        words += ["--data.valid", "null", "--data.tests", "{}", "--train.dtype", "fp32", "--method", "kd"]
        words += ["--student.factorize.weighting", "none", "--student.factorize.allocation", "uniform"]
        words += ["--teacher.model", str(files["teacher"]), "--student.model", str(files["student"])]
        plan = make_plan(parse_run([*words, *arguments], METHODS)[0])
        return plan, plan.task.read(plan.models).prepared(WORLD)

    return make


@pytest.fixture(scope="module")
def made(planned, tmp_path_factory):
    """The folder of a cache; equal settings are made once. It must not be changed."""
    folders: dict[Any, Path] = {}

    def make(*arguments: str, settings: CacheConfig = SMALL) -> Path:
        key = (*arguments, settings)
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp("cache") / "cache"
            cache.make_cache(*planned(*arguments), settings, folders[key], WORLD)
        return folders[key]

    return make


@pytest.fixture
def broken(made, tmp_path) -> Path:
    """A copy of a cache."""
    shutil.copytree(made(), tmp_path / "broken")
    return tmp_path / "broken"


def checked(planned, folder: Path, *arguments: str) -> None:
    cache.check_cache(*planned("--teacher.cache", str(folder), *arguments), WORLD)


def batches(plan: Plan, data: Any, size: int = 5) -> list[Batch]:
    loader = data.loader(Share(seed=0, global_batch_size=size, micro_batch_size=size))
    return [batch.with_label_rows(shift=True) for step in range(3) for batch in loader.micro_batches(step)]


def losses(plan: Plan, teacher: Any, found: list[Batch]) -> list[dict[str, Any]]:
    """Each term, and the gradients of the student."""
    student = loaded(plan, "student")
    wired = tapped(plan.method, "student", student, vocabulary=plan.models.vocabulary)
    results = []
    for batch in found:
        with torch.no_grad():
            taught = teacher.teach(batch, lm_head=plan.method.teacher_positions)
        learned = wired.learn(batch, plan.method.running(taught, batch))
        student.zero_grad()
        learned.total.backward()
        results.append(
            {name: loss.sum / loss.count for name, loss in learned.terms.items()}
            | {
                name: each.grad / batch.input_ids.numel()
                for name, each in student.named_parameters()
                if each.grad is not None
            }
        )
    wired.remove()
    return results


def loaded(plan: Plan, role: str) -> Any:
    path = plan.config.student.model if role == "student" else plan.config.teacher.model
    return load_model(str(path), dtype=torch.float32, head=plan.task.head or "lm_head")


def cached(plan: Plan, folder: Path) -> CachedTeacher:
    return CachedTeacher(CacheFolder(folder), request_of(plan.method), shift=True, device=WORLD.device)


METHOD_SETTINGS = {
    "kd": ["--method", "kd"],
    "kd at 2 reversed": ["--method", "kd", "--kd.temperature", "2", "--kd.divergence", "reverse_kl"],
    "makd": ["--method", "makd"],
    "minilmv2": ["--method", "minilmv2", "--minilmv2.relation_heads", "4"],
}


@pytest.mark.parametrize(
    ("words", "packing"), zip(METHOD_SETTINGS.values(), (False, True, True, False), strict=True), ids=METHOD_SETTINGS
)
def test_losses_and_gradients_are_those_of_the_live_teacher(planned, made, words, packing):
    """Whatever the batches: the cache is made from batches of three neighbors, in packed rows if these are not."""
    plan, data = planned(*words, "--data.packing", str(packing).lower())
    live = make_teacher(plan, WORLD)
    wired = tapped(plan.method, "teacher", live.model, forward=live.forward)
    found = batches(plan, data)
    expected = losses(plan, wired, found)
    folder = made(*words, "--data.packing", str(not packing).lower())
    for ours, theirs in zip(losses(plan, cached(plan, folder), found), expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            torch.testing.assert_close(value, theirs[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", ["kd", "minilmv2"])
def test_a_classifier_teaches_from_a_cache_too(method, tmp_path):
    """On a task of GLUE: the outputs for whole sequences, and relations of all tokens."""
    lines = [
        f"{n}\tthe baker number {n} and {'so ' * (n % 5)}on\tthen{n % 3}\t{'not_' * (n % 2)}entailment"
        for n in range(14)
    ]
    for split in ("train", "dev"):
        file = tmp_path / "glue" / "RTE" / f"{split}.tsv"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(["index\tsentence1\tsentence2\tlabel", *lines]) + "\n", encoding="utf-8")
    words = ["--recipe", "finetune", "--ds_config", str(ROOT / "ds_configs/zero2.json"), "--method", method]
    words += ["--teacher.model", str(model(tmp_path / "teacher", 0, LlamaForSequenceClassification))]
    words += ["--student.model", str(model(tmp_path / "student", 1, LlamaForSequenceClassification))]
    words += ["--data.task.dir", str(tmp_path / "glue"), "--train.dtype", "fp32", "--minilmv2.relation_heads", "4"]
    plan = make_plan(parse_run(words, METHODS)[0])
    data = plan.task.read(plan.models)
    cache.make_cache(plan, data, SMALL, tmp_path / "cache", WORLD)
    again = make_plan(parse_run([*words, "--teacher.cache", str(tmp_path / "cache")], METHODS)[0])
    cache.check_cache(again, data, WORLD)
    live = make_teacher(plan, WORLD)
    wired = tapped(plan.method, "teacher", live.model, forward=live.forward)
    found = batches(plan, data)
    expected = losses(plan, wired, found)
    for ours, theirs in zip(losses(again, cached(again, tmp_path / "cache"), found), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert {"kd": "sequence_forward_kl", "minilmv2": "relation_qq"}[method] in expected[0]


def test_hidden_states_give_the_divergence_of_plain_torch(planned, made):
    """In fp64, one example at a time, without padding."""
    plan, data = planned()
    (batch, *_) = batches(plan, data)
    taught = cached(plan, made()).teach(batch, lm_head=["labels"]).lm_head["labels"]
    teacher, student = (loaded(plan, role).double() for role in ("teacher", "student"))
    total = 0.0
    for row in range(len(batch.input_ids)):
        length = int(batch.attention_mask[row].sum())
        ids = batch.input_ids[row : row + 1, :length]
        learned = batch.labels[row, 1:length] != IGNORE_INDEX
        with torch.no_grad():
            log_p, log_q = (each(ids).logits[0, :-1][learned].log_softmax(-1) for each in (teacher, student))
        total += float(functional.kl_div(log_q, log_p, reduction="sum", log_target=True))
    found = losses(plan, cached(plan, made()), [batch])[0]["forward_kl"] * len(batch.label_rows)
    assert taught.weight.shape == (plan.models.teacher.vocab_size, 32)
    assert float(found) == pytest.approx(total, rel=1e-5)


def test_top_k_is_below_the_whole_divergence_by_that_within_the_tail(planned, made):
    plan, data = planned("--kd.temperature", "2")
    folder = made("--kd.temperature", "2", settings=TOP_K)
    (batch, *_) = batches(plan, data)
    with torch.no_grad():
        shown = [
            loaded(plan, role).double()(batch.input_ids, batch.attention_mask).logits for role in ("teacher", "student")
        ]
    log_p, log_q = ((each.flatten(0, 1)[batch.label_rows] / 2).log_softmax(-1) for each in shown)
    rank = log_p.argsort(descending=True).argsort()
    tail = rank >= TOP_K.top_k
    whole, missing = (log_p.exp() * (log_p - log_q)).sum(), 0.0
    for p, q, outside in zip(log_p, log_q, tail, strict=True):
        inner_p, inner_q = p[outside].log_softmax(0), q[outside].log_softmax(0)
        missing += float(p[outside].exp().sum() * (inner_p.exp() * (inner_p - inner_q)).sum())
    found = losses(plan, cached(plan, folder), [batch])[0]["forward_kl"] * len(batch.label_rows)
    assert missing > 0.01 * float(whole)
    assert float(found) == pytest.approx(4 * (float(whole) - missing), rel=1e-5)
    assert not (folder / "head.safetensors").exists()


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        (METHOD_SETTINGS["kd"], CacheConfig()),
        (METHOD_SETTINGS["kd at 2 reversed"], TOP_K),
        (METHOD_SETTINGS["minilmv2"], SMALL),
        (METHOD_SETTINGS["makd"], CacheConfig(content="top_k", top_k=4)),
    ],
    ids=["hidden states", "top k", "taps", "taps and top k"],
)
def test_forecast_of_its_size_is_its_size(planned, made, words, settings):
    plan, data = planned(*words)
    models, counts = build_models(plan), PositionCounts(**cache.count_examples(plan, data))
    asked, trace = trace_making(plan, models, CacheAsked(settings=settings, counts=counts))
    found = forecast_making(plan, asked, trace, Sizes.of(models.student, models.teacher), MachineConfig())
    folder = made(*words, settings=settings)
    record = json.loads((folder / "cache.json").read_text())
    assert (counts.sequences, counts.tokens) == (record["examples"], record["tokens"])
    files = [folder / name for name in record["files"]]
    written = sum(file.stat().st_size - 8 - int.from_bytes(file.read_bytes()[:8], "little") for file in files)
    shards = sum(file.parent.name == "shards" for file in files)
    assert written == found.bytes + 8 * len(POSITIONS) * shards  # the end of the last example's rows


def test_an_interrupted_cache_goes_on_and_is_the_same(planned, made, tmp_path, monkeypatch):
    plan, data = planned()
    write, written = shards.write_tensors, list[str]()

    def dies(folder, name, *others):
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(name)
        write(folder, name, *others)

    monkeypatch.setattr(shards, "write_tensors", dies)
    with pytest.raises(KeyboardInterrupt):
        cache.make_cache(plan, data, SMALL, tmp_path / "cache", WORLD)
    with pytest.raises(UserError, match=r"it has no cache.json, so it is an unfinished cache: go on"):
        CacheFolder(tmp_path / "cache")
    monkeypatch.setattr(
        shards, "write_tensors", lambda folder, name, *rest: (written.append(name), write(folder, name, *rest))
    )
    cache.make_cache(plan, data, SMALL, tmp_path / "cache", WORLD)
    assert len(written) == len(set(written)) > 5, "a file was written twice"
    names = sorted(str(file.relative_to(made())) for file in made().rglob("*") if file.is_file())
    assert (
        sorted(str(file.relative_to(tmp_path / "cache")) for file in (tmp_path / "cache").rglob("*") if file.is_file())
        == names
    )
    for name in names:
        assert (made() / name).read_bytes() == (tmp_path / "cache" / name).read_bytes(), name


def test_a_finished_cache_is_left_alone_and_a_lost_file_is_made_again(planned, broken, monkeypatch):
    plan, data = planned()
    before = (broken / "cache.json").read_bytes()
    lost = broken / "shards/00001.safetensors"
    content = lost.read_bytes()
    lost.unlink()
    with pytest.raises(UserError, match=r"00001.safetensors is missing; remove"):
        checked(planned, broken)
    cache.make_cache(plan, data, SMALL, broken, WORLD)
    assert (lost.read_bytes(), (broken / "cache.json").read_bytes()) == (content, before)
    monkeypatch.setattr(cache, "make_teacher", None)
    cache.make_cache(plan, data, SMALL, broken, WORLD)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


def test_damage_is_named(planned, broken):
    checked(planned, broken)
    flip(broken / "shards/00002.safetensors")
    with pytest.raises(UserError, match=r"shards/00002.safetensors changed after it was written .* remove the file if"):
        checked(planned, broken)
    file = broken / "head.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"head.safetensors has [\d,]+ bytes and had [\d,]+ when it was written"):
        checked(planned, broken)
    (broken / "cache.json").write_text("{")
    with pytest.raises(UserError, match=r"cache.json: not valid JSON"):
        checked(planned, broken)
    with pytest.raises(UserError, match=r"it has no cache.json, so it is no teacher's cache: make one with"):
        checked(planned, broken / "nowhere")


def test_an_example_that_is_not_there_is_named_when_it_is_read(planned, made):
    plan, data = planned()
    (batch, *_) = batches(plan, data)
    stranger = Batch(batch.input_ids[:1], batch.attention_mask[:1], batch.labels[:1], sample_ids=((7,),))
    with pytest.raises(UserError, match=r"the teacher's cache has no example 7; make a cache of this run's data"):
        cached(plan, made()).teach(stranger, lm_head=["labels"])
    other = Batch(
        *(each[:1] for each in (batch.input_ids, batch.attention_mask, batch.attention_mask)),
        sample_ids=batch.sample_ids[:1],
    )
    with pytest.raises(UserError, match=r"holds \d+ rows of labels.states for a batch with \d+ labels"):
        cached(plan, made()).teach(other, lm_head=["labels"])


def test_another_teacher_tokenizer_format_method_or_data_is_refused(planned, made, files, tmp_path):
    mine = str(made())

    def refused(*arguments: str, folder: str = mine) -> str:
        with pytest.raises(UserError) as error:
            checked(planned, Path(folder), *arguments)
        assert str(error.value).startswith(f"teacher.cache {folder}: ")
        assert "`llmdistill cache`" in str(error.value)
        return str(error.value)

    other = model(tmp_path / "other", 5)
    assert "its teacher is sha256:" in refused("--teacher.model", str(other))
    assert f"({files['teacher']}), and that of this run is sha256:" in refused("--teacher.model", str(other))
    assert "its dtype is float32, and that of this run is bfloat16" in refused("--teacher.dtype", "bf16")
    assert "does not hold the query of layer 2, which method minilmv2 needs" in refused(*METHOD_SETTINGS["minilmv2"])
    top = str(made(settings=TOP_K))
    assert "does not hold the tail's mass at temperature 3" in refused("--kd.temperature", "3", folder=top)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"instruction": "Sing.", "output": "la"}\n' + files["data"].read_text(), encoding="utf-8")
    said = refused("--data.train", str(rows))
    assert "1 of the 27 examples are not in it, first the one with the id" in said
    assert f"data.train was {files['data']} and is now {rows}" in said


def test_cut_examples_are_others_and_a_part_of_the_data_is_enough(planned, made, files, tmp_path):
    cut = ["--data.max_length", "24", "--data.max_prompt_length", "20", "--data.long_prompts", "truncate"]
    with pytest.raises(UserError, match=r"data.max_length was 160 and is now 24: make a cache"):
        checked(planned, made(), *cut)
    part = tmp_path / "part.jsonl"
    part.write_text("".join(files["data"].read_text().splitlines(keepends=True)[3:9]), encoding="utf-8")
    checked(planned, made(), "--data.train", str(part), "--data.packing", "true")
    checked(planned, made(), "--data.max_length", "110")  # nothing is cut
    checked(planned, made(), "--method", "sft")  # does not look at it


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--data.streaming", "true"], "data.streaming reads the examples while it trains"),
        (["--data.on_policy", "0.5"], "data.on_policy 0.5 has the student write some of the answers"),
    ],
)
def test_runs_without_fixed_examples_are_refused_by_the_plan(planned, made, arguments, sentence):
    with pytest.raises(UserError, match=sentence):
        planned("--teacher.cache", str(made()), *arguments)


def test_masks_of_an_encoder_are_no_examples(planned, tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokenizer = load_tokenizer(locate("embedded:teacher"))
    BertConfig(vocab_size=len(tokenizer), architectures=["BertForMaskedLM"], **sizes).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    encoder = ["--teacher.model", str(tmp_path), "--student.model", str(tmp_path), "--teacher.cache", "nowhere"]
    with pytest.raises(UserError, match=r"but data.kind text masks the sequences of an encoder anew in every epoch"):
        planned("--data.kind", "text", *encoder)


@pytest.fixture(scope="module")
def text_words(tmp_path_factory) -> list[str]:
    """Settings of a text in two parts, of which one is over-sampled, with a validation text."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "parts").mkdir()
    for name, lines in {"parts/long": range(40), "parts/short": range(40, 46), "valid": range(100, 130)}.items():
        text = "\n\n".join(f"In year {n} the baker counted {'so ' * (n % 5)}{7 * n} loaves of bread." for n in lines)
        (folder / f"{name}.txt").write_text(text + "\n", encoding="utf-8")
    words = ["--data.kind", "text", "--data.train", str(folder / "parts"), "--data.valid", str(folder / "valid.txt")]
    words += ["--data.text.sampling_exponent", "0.3", "--data.text.valid_sequences", "3"]
    return [*words, "--data.max_length", "24", "--data.cache_dir", str(folder / "tokens")]


def test_texts_of_a_decoder_have_the_losses_of_the_live_teacher(planned, made, text_words):
    """In every epoch, whatever the seed, and on the validation text."""
    words = [*text_words, "--method", "makd"]
    plan, data = planned(*words)
    folder = made(*words)
    cache.check_cache(*planned(*words, "--teacher.cache", str(folder), "--seed", "3"), WORLD)
    loader = data.loader(Share(seed=3, global_batch_size=20, micro_batch_size=20))
    assert len(loader.sequences) < 4 * 20, "the steps are of several epochs"
    found = [each for step in range(4) for each in loader.micro_batches(step)]
    found += data.validation(Share(seed=3, global_batch_size=4, micro_batch_size=4))
    found = [batch.with_label_rows(shift=True) for batch in found]
    live = make_teacher(plan, WORLD)
    wired = tapped(plan.method, "teacher", live.model, forward=live.forward)
    expected = losses(plan, wired, found)
    for ours, theirs in zip(losses(plan, cached(plan, folder), found), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_a_cache_of_other_texts_is_refused(planned, made, text_words):
    text_words = [*text_words, "--method", "makd"]
    folder = made(*text_words)
    with pytest.raises(
        UserError, match=r"examples are not in it.*; data.max_length was 24 and is now 20: make a cache"
    ):
        checked(planned, folder, *text_words, "--data.max_length", "20")
    with pytest.raises(UserError, match=r"data.text.valid_sequences was 3 and is now 9"):
        checked(planned, folder, *text_words, "--data.text.valid_sequences", "9")
    checked(planned, folder, *text_words, "--data.text.sampling_exponent", "1")


def test_a_method_without_teacher_and_too_many_tokens_are_refused(planned, tmp_path):
    with pytest.raises(UserError, match="method sft has no teacher, so there is nothing to cache"):
        cache.make_cache(*planned("--method", "sft"), SMALL, tmp_path / "cache", WORLD)
    many = CacheConfig(content="top_k", top_k=5000)
    with pytest.raises(UserError, match=r"--cache.top_k is 5000, but teacher and student share \d+ tokens: give less"):
        cache.make_cache(*planned(), many, tmp_path / "cache", WORLD)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="the folder is not empty and holds no teacher's cache"):
        cache.make_cache(*planned(), SMALL, tmp_path, WORLD)


def test_another_request_does_not_overwrite_a_cache(planned, made):
    with pytest.raises(UserError, match=r"it holds another cache: settings.micro_batch_size was 3 and is now 4"):
        cache.make_cache(*planned(), CacheConfig(micro_batch_size=4, shard_tokens=150), made(), WORLD)


def test_vllm_writes_the_likely_tokens_that_the_teacher_writes(planned, made, tmp_path, monkeypatch):
    words = ["--method", "kd", "--data.packing", "true"]
    plan, data = planned(*words)
    folder = made(*words, settings=replace(TOP_K, engine="hf"))
    asked = install(monkeypatch)
    monkeypatch.setattr(cache, "make_teacher", lambda *_: pytest.fail("vLLM loads the teacher itself"))
    record = cache.make_cache(plan, data, TOP_K, tmp_path / "cache", WORLD)
    assert record["settings"]["engine"] == "vllm"
    assert [each["max_logprobs"] for each in asked if "model" in each] == [20]
    checked(planned, tmp_path / "cache", *words)
    found = batches(plan, data)
    expected = losses(plan, cached(plan, folder), found)
    for ours, theirs in zip(losses(plan, cached(plan, tmp_path / "cache"), found), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("words", "settings", "said"),
    [
        ((), CacheConfig(), "vLLM gives no hidden states; take --cache.content top_k, or --cache.engine hf"),
        (("--kd.temperature", "2"), TOP_K, "the tail's mass at temperature 2 does not follow from vLLM's answers"),
        (("--method", "makd"), TOP_K, "method makd needs more of its teacher than log-probabilities"),
        (("--data.max_length", "512"), TOP_K, "generates a token after the 512 of data.max_length"),
    ],
)
def test_vllm_is_refused_where_it_cannot_give_what_is_kept(planned, tmp_path, monkeypatch, words, settings, said):
    install(monkeypatch)
    plan, data = planned(*words)
    assert cache.engine_of(plan, settings, WORLD) == "hf"
    with pytest.raises(UserError, match=f"--cache.engine vllm: .*{said}"):
        cache.make_cache(plan, data, replace(settings, engine="vllm"), tmp_path / "cache", WORLD)
    with pytest.raises(UserError, match=r"--cache.engine vllm: vLLM drives all GPUs .* or take --cache.engine hf"):
        cache.engine_of(planned()[0], replace(TOP_K, engine="vllm"), replace(WORLD, size=2))


def test_a_run_is_identified_by_the_content_of_its_cache(planned, broken):
    config = planned("--teacher.cache", str(broken))[0].config
    before = run_record(config, 1)["inputs"]
    assert before["teacher.cache"].startswith("sha256:")
    record = read_cache_record(broken)
    write_json(broken / "cache.json", record | {"model": "moved"})
    assert run_record(config, 1)["inputs"] == before
    record["files"]["head.safetensors"]["sha256"] = "0"
    write_json(broken / "cache.json", record)
    assert run_record(config, 1)["inputs"] != before


def test_only_the_rows_of_a_batch_are_read(made, planned, monkeypatch):
    plan, data = planned()
    folder, read = CacheFolder(made()), list[int]()
    rows = folder.rows

    def counted(name, places):
        found = rows(name, places)
        read.append(len(found))
        return found

    monkeypatch.setattr(folder, "rows", counted)
    (batch, *_) = batches(plan, data, size=2)
    teacher = CachedTeacher(folder, request_of(plan.method), shift=True, device=WORLD.device)
    teacher.teach(batch, lm_head=["labels"])
    assert read == [len(batch.label_rows)]
    assert cache_folder.entry_of(made(), "shards/00000.safetensors", folder.record) is not None
