"""A teacher's outputs in a file: the losses of the live teacher, its size, and what is left of an interruption."""

import json
import re
from dataclasses import replace

import pytest
import torch
from caches import SMALL, TOP_K, batches, cached, checked, loaded, losses, model
from glue_tasks import write_task
from hostile import refuses
from safetensors import safe_open
from stand_in_server import serving
from torch.nn import functional
from transformers import LlamaForSequenceClassification

from llmdistill.batch import IGNORE_INDEX, POSITIONS, Batch
from llmdistill.config.command_line import parse_run
from llmdistill.config.machine import MachineConfig
from llmdistill.config.teacher import CacheConfig
from llmdistill.data.sampler import Share
from llmdistill.losses.agreement import divergence_from
from llmdistill.methods import METHODS
from llmdistill.planning.choices import CacheRequest, forecast_cache
from llmdistill.planning.layout import Sizes
from llmdistill.planning.step import build_models
from llmdistill.step.tap_models import tap_teacher
from llmdistill.teachers.cache import making, shards
from llmdistill.teachers.cache.folder import CacheFolder
from llmdistill.teachers.cache.making import count_examples, make_cache
from llmdistill.teachers.cache.origin import check_cache
from llmdistill.teachers.live import TeacherOnDemand, make_teacher
from llmdistill.teachers.source import TeacherContext
from llmdistill.training.cost import estimate_cost
from llmdistill.training.headline import headline
from llmdistill.training.plan import Plan, make_plan

from stand_in_vllm import install

PACKED = ("--data.packing", "true")
METHOD_SETTINGS = {
    "kd at 2 reversed": ["--method", "kd", "--kd.temperature", "2", "--kd.divergence", "reverse_kl"],
    "makd": ["--method", "makd"],
    "minilmv2": ["--method", "minilmv2", "--minilmv2.relation_heads", "4"],
}


def assert_as_live(plan: Plan, teacher, found: list[Batch]):
    """Check that a cached teacher gives the terms and gradients of the live one; returns those of the first batch."""
    live = make_teacher(plan)
    expected = losses(plan, tap_teacher(plan.method, live.model, forward=live.forward), found)
    torch.testing.assert_close(losses(plan, teacher, found), expected, rtol=1e-4, atol=1e-6)
    return expected[0]


@pytest.mark.parametrize(
    ("words", "packing"), zip(METHOD_SETTINGS.values(), (True, True, False), strict=True), ids=METHOD_SETTINGS
)
def test_losses_and_gradients_are_those_of_the_live_teacher(planned, made, words, packing):
    """Whatever the batches: the cache is made from batches of three neighbors, in packed rows if these are not."""
    plan, data = planned(*words, "--data.packing", str(packing).lower())
    folder = made(*words, "--data.packing", str(not packing).lower())
    assert_as_live(plan, cached(plan, folder), batches(plan, data))


def test_a_classifier_teaches_from_a_cache_too(tmp_path):
    """On a task of GLUE: the outputs for whole sequences, and relations of all tokens."""
    write_task(tmp_path / "glue", "RTE", {"train": 14, "dev": 14})
    words = ["--recipe", "finetune", "--ds_config", "zero2", "--method", "kd", "--also", "[minilmv2]"]
    words += ["--teacher.model", str(model(tmp_path / "teacher", 0, LlamaForSequenceClassification))]
    words += ["--student.model", str(model(tmp_path / "student", 1, LlamaForSequenceClassification))]
    words += ["--data.task.dir", str(tmp_path / "glue"), "--train.dtype", "fp32", "--minilmv2.relation_heads", "4"]
    plan = make_plan(parse_run(words, METHODS)[0])
    data = plan.task.read(plan.models)
    make_cache(plan, data, SMALL, tmp_path / "cache")
    again = make_plan(parse_run([*words, "--teacher.cache", str(tmp_path / "cache")], METHODS)[0])
    check_cache(again, data)
    found = assert_as_live(plan, cached(again, tmp_path / "cache"), batches(plan, data))
    assert {"sequence_forward_kl", "relation_qq"} <= {name.rpartition(".")[2] for name in found}


def test_hidden_states_give_the_divergence_of_plain_torch(planned, made):
    """In fp64, one example at a time, without padding."""
    plan, data = planned()
    (batch, *_) = batches(plan, data)
    targets = cached(plan, made()).compute_targets(batch, lm_head=["labels"]).lm_head["labels"]
    teacher, student = (loaded(plan, role).double() for role in ("teacher", "student"))
    total = 0.0
    for row in range(len(batch.input_ids)):
        length = int(batch.attention_mask[row].sum())
        ids = batch.input_ids[row : row + 1, :length]
        learned = batch.labels[row, 1:length] != IGNORE_INDEX
        with torch.no_grad():
            log_p, log_q = (each(ids).logits[0, :-1][learned].log_softmax(-1) for each in (teacher, student))
        total += float(functional.kl_div(log_q, log_p, reduction="sum", log_target=True))
    found = losses(plan, cached(plan, made()), [batch])[0]["forward_kl"] * len(batch.label_positions)
    assert targets.weight.shape == (plan.models.teacher.vocab_size, 32)
    assert float(found) == pytest.approx(total, rel=1e-5)


def test_hidden_states_in_8_bits_move_the_distributions_within_their_bound(planned, made, capsys):
    """Rounding moves a logit by less than half a scale times the sum of its weights, and so bounds the divergence."""
    plan, data = planned()
    folders = made(), made(settings=replace(SMALL, dtype="int8"))
    said = capsys.readouterr().out
    (batch, *_) = batches(plan, data)
    exact, rounded = (
        cached(plan, folder).compute_targets(batch, lm_head=["labels"]).lm_head["labels"] for folder in folders
    )
    with safe_open(folders[1] / "shards/00000.safetensors", framework="pt") as file:
        states, scale = file.get_tensor("labels.states"), file.get_tensor("labels.scale")
    assert (states.dtype, states.abs().amax(1).unique().tolist()) == (torch.int8, [127])
    assert states.nbytes + scale.nbytes == len(states) * (32 + 4), "fp32 would take four times the states"
    error_N = exact.rows.abs().amax(1, keepdim=True) / 127 / 2
    assert ((rounded.rows - exact.rows).abs() <= error_N * (1 + 1e-5)).all()
    log_p, log_q = ((each.rows.double() @ each.weight.double().T).log_softmax(-1) for each in (exact, rounded))
    kl_N = (log_p.exp() * (log_p - log_q)).sum(-1)
    # The divergence of logits that differ by numbers in an interval is at most its width squared / 8 (Hoeffding).
    widest = torch.cdist(exact.weight, exact.weight, p=1).max()
    assert (kl_N <= (error_N[:, 0] * widest) ** 2 / 8).all()
    assert float(divergence_from(exact, rounded)) == pytest.approx(kl_N.sum().item(), rel=1e-2, abs=1e-6)
    nats = float(re.search(r"in int8: on the first batch (\S+) nats a token", said)[1])
    assert 0 < nats < 1e-3


def test_a_cache_from_before_a_setting_goes_on(planned, broken):
    record = json.loads((broken / "cache.json").read_text())
    del record["settings"]["dtype"]
    (broken / "cache.json").write_text(json.dumps(record))
    (broken / "shards/00001.safetensors").unlink()
    make_cache(*planned(), SMALL, broken)
    checked(planned, broken)
    refuses("it holds another cache", make_cache, *planned(), replace(SMALL, dtype="int8"), broken)


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        (["--method", "kd"], SMALL),
        (["--method", "kd"], replace(SMALL, dtype="int8")),
        (METHOD_SETTINGS["makd"], CacheConfig(content="top_k", top_k=4)),
    ],
    ids=["hidden states", "in 8 bits", "taps and top k"],
)
def test_forecast_of_its_size_is_its_size(planned, made, words, settings):
    plan, data = planned(*words)
    models, counts = build_models(plan), count_examples(plan, data)
    vast = {place: 10**6 * number for place, number in counts.items()}
    asked = [CacheRequest(settings=settings, counts=each) for each in (counts, vast)]
    sizes = Sizes.of(models.student, models.teacher)
    found, large = (forecast_cache(plan, models, each, sizes, MachineConfig())[1] for each in asked)
    assert found.is_sensible
    assert not large.is_sensible, "far larger than its teacher, though the disk has room"
    folder = made(*words, settings=settings)
    record = json.loads((folder / "cache.json").read_text())
    assert (counts["sequences"], counts["tokens"]) == (record["examples"], record["tokens"])
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
        make_cache(plan, data, SMALL, tmp_path / "cache")
    refuses("it has no cache.json, so it is an unfinished cache: go on", CacheFolder, tmp_path / "cache")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.safetensors")}
    monkeypatch.setattr(shards, "write_tensors", write)
    make_cache(plan, data, SMALL, tmp_path / "cache")
    assert len(before) == 3
    assert before == {path: path.stat().st_mtime_ns for path in before}, "a file was written twice"
    again, whole = (
        {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
        for folder in (tmp_path / "cache", made())
    )
    assert again == whole


def test_a_finished_cache_is_left_alone_and_a_lost_file_is_made_again(planned, broken, monkeypatch):
    plan, data = planned()
    before = (broken / "cache.json").read_bytes()
    lost = broken / "shards/00001.safetensors"
    content = lost.read_bytes()
    lost.unlink()
    refuses("00001.safetensors is missing; remove", checked, planned, broken)
    make_cache(plan, data, SMALL, broken)
    assert (lost.read_bytes(), (broken / "cache.json").read_bytes()) == (content, before)
    monkeypatch.setattr(making, "make_teacher", None)
    make_cache(plan, data, SMALL, broken)


def test_texts_of_a_decoder_have_the_losses_of_the_live_teacher(planned, made, text_words):
    """In every epoch, whatever the seed, and on the validation text."""
    words = [*text_words, "--method", "makd"]
    plan, data = planned(*words)
    folder = made(*words)
    check_cache(*planned(*words, "--teacher.cache", str(folder), "--seed", "3"))
    loader = data.loader(Share(seed=3, global_batch_size=20, micro_batch_size=20))
    assert len(loader.sequences) < 4 * 20, "the steps are of several epochs"
    found = [each for step in (0, 3) for each in loader.micro_batches(step)]
    found += data.validation(Share(seed=3, global_batch_size=4, micro_batch_size=4))
    found = [batch.with_positions(shift=True) for batch in found]
    assert_as_live(plan, cached(plan, folder), found)


def test_a_server_writes_the_likely_tokens_that_the_teacher_writes(planned, made, files, tmp_path, monkeypatch):
    expected = made(*PACKED, settings=replace(TOP_K, engine="hf"))
    monkeypatch.setattr(making, "make_teacher", lambda *_: pytest.fail("the server has the teacher"))
    with serving(files["teacher"]) as server:
        plan, data = planned(*PACKED, "--teacher.url", server.url, "--teacher.top_k", "20")
        record = make_cache(plan, data, CacheConfig(micro_batch_size=4), tmp_path / "cache")
        assert len(server.asked) == record["examples"] + 1 == 26  # equal examples once, and the check's own
        found = batches(plan, data)
        asked = losses(plan, plan.source.build(TeacherContext(plan, data, TeacherOnDemand(plan))), found)
    assert (record["held"]["top_k"], record["settings"]["content"]) == (20, "top_k")
    checked(planned, tmp_path / "cache", *PACKED)
    for folder in (expected, tmp_path / "cache"):
        torch.testing.assert_close(asked, losses(plan, cached(plan, folder), found), rtol=1e-4, atol=1e-5)
    assert f"asked at {server.url}; it is not scored" in headline(plan, "")
    assert estimate_cost(plan)["flops"] < estimate_cost(planned(*PACKED)[0])["flops"], "the teacher is not counted"


def test_vllm_writes_the_likely_tokens_that_the_teacher_writes(planned, made, tmp_path, monkeypatch):
    plan, data = planned(*PACKED)
    folder = made(*PACKED, settings=replace(TOP_K, engine="hf"))
    asked = install(monkeypatch)
    monkeypatch.setattr(making, "make_teacher", lambda *_: pytest.fail("vLLM loads the teacher itself"))
    record = make_cache(plan, data, TOP_K, tmp_path / "cache")
    assert record["settings"]["engine"] == "vllm"
    assert not (folder / "head.safetensors").exists()
    assert [each["max_logprobs"] for each in asked if "model" in each] == [20]
    checked(planned, tmp_path / "cache", *PACKED)
    ours, theirs = (losses(plan, cached(plan, each), batches(plan, data)) for each in (tmp_path / "cache", folder))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
