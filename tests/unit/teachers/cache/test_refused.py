"""Caches that are damaged, of something else, or cannot be made."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from caches import SMALL, TOP_K, batches, cached, checked, model
from hostile import refuses
from tiny import tiny_config

from llmdistill.batch import Batch
from llmdistill.config.teacher import CacheConfig
from llmdistill.embedded import locate
from llmdistill.errors import UserError
from llmdistill.models.tokenizer import load_tokenizer
from llmdistill.teachers.cache.making import engine_of, make_cache

from stand_in_vllm import install


def test_an_example_that_is_not_there_is_named_when_it_is_read(planned, made):
    plan, data = planned()
    (batch, *_) = batches(plan, data)
    stranger = Batch(batch.input_ids[:1], batch.attention_mask[:1], batch.labels[:1], sample_ids=((7,),))
    compute_targets = partial(cached(plan, made()).compute_targets, lm_head=["labels"])
    refuses("the teacher's cache has no example 7; make a cache of this run's data", compute_targets, stranger)
    ids, mask = batch.input_ids[:1], batch.attention_mask[:1]
    other = Batch(ids, mask, mask, sample_ids=batch.sample_ids[:1])
    refuses("rows of labels.states for a batch with ", compute_targets, other)


def test_another_teacher_tokenizer_format_method_or_data_is_refused(planned, made, files, tmp_path):
    mine = str(made())

    def refused(*arguments: str, folder: str = mine) -> str:
        with pytest.raises(UserError) as error:
            checked(planned, Path(folder), *arguments)
        assert str(error.value).startswith(f"teacher.cache {folder}: ")
        assert "`llmdistill cache`" in str(error.value)
        return str(error.value)

    other = model(tmp_path / "other", 5)
    said = refused("--teacher.model", str(other))
    assert "its teacher is sha256:" in said
    assert f"({files['teacher']}), and that of this run is sha256:" in said
    assert "its dtype is float32, and that of this run is bfloat16" in refused("--teacher.dtype", "bf16")
    relations = ("--method", "minilmv2", "--minilmv2.relation_heads", "4")
    assert "does not hold the query of layer 2, which method minilmv2 needs" in refused(*relations)
    top = str(made(settings=TOP_K))
    assert "does not hold the mass of the rest at temperature 3" in refused("--kd.temperature", "3", folder=top)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"instruction": "Sing.", "output": "la"}\n' + files["data"].read_text(), encoding="utf-8")
    said = refused("--data.train", str(rows))
    assert "1 of the 27 examples are not in it, first the one with the id" in said
    assert f"data.train was {files['data']} and is now {rows}" in said


def test_a_part_of_the_data_is_enough_and_a_method_without_teacher_does_not_look(planned, made, files, tmp_path):
    part = tmp_path / "part.jsonl"
    part.write_text("".join(files["data"].read_text().splitlines(keepends=True)[3:9]), encoding="utf-8")
    checked(planned, made(), "--data.train", str(part), "--data.packing", "true", "--data.max_length", "110")
    checked(planned, made(), "--method", "sft", "--teacher.dtype", "bf16")


def test_runs_without_fixed_examples_and_without_a_cache_are_refused(planned, made, tmp_path):
    tokenizer = load_tokenizer(locate("embedded:teacher"))
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 512, "architectures": ["BertForMaskedLM"]}
    tiny_config("bert", **sizes).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    encoder = ["--teacher.model", str(tmp_path), "--student.model", str(tmp_path)]
    for arguments, sentence in (
        (["--data.streaming", "true"], "data.streaming reads the examples while it trains"),
        (["--data.on_policy", "0.5"], "data.on_policy 0.5 has the student write some of the answers"),
        (["--data.kind", "text", *encoder], "but data.kind text masks the sequences of an encoder anew in every epoch"),
    ):
        refuses(sentence, planned, "--teacher.cache", str(made()), *arguments)
    refuses("it has no cache.json, so it is no teacher's cache: make one with", checked, planned, made() / "nowhere")


def test_a_cache_of_other_texts_is_refused(planned, made, text_words):
    text_words = [*text_words, "--method", "makd"]
    folder = made(*text_words)
    with pytest.raises(UserError, match=r"not in it.*; data.max_length was 24 and is now 20: make a cache"):
        checked(planned, folder, *text_words, "--data.max_length", "20")
    number = ("--data.text.valid_sequences", "9")
    refuses("data.text.valid_sequences was 3 and is now 9", checked, planned, folder, *text_words, *number)
    checked(planned, folder, *text_words, "--data.text.sampling_exponent", "1")


def test_what_cannot_be_made_is_refused(planned, made, tmp_path):
    (tmp_path / "file").write_text("")
    many, other = CacheConfig(content="top_k", top_k=5000), replace(SMALL, micro_batch_size=4)
    for arguments, settings, folder, said in (
        (["--method", "sft"], SMALL, tmp_path / "cache", "method sft has no teacher, so there is nothing to cache"),
        ([], many, tmp_path / "cache", "--cache.top_k is 5000, but teacher and student share 1024 tokens: give less"),
        ([], SMALL, tmp_path, "the folder is not empty and holds no teacher's cache"),
        ([], other, made(), "it holds another cache: settings.micro_batch_size was 3 and is now 4"),
    ):
        refuses(said, make_cache, *planned(*arguments), settings, folder)


URL = ("--teacher.url", "http://127.0.0.1:1")
TOP = ("--teacher.top_k", "20")


def test_what_a_server_cannot_give_and_settings_that_contradict_each_other_are_refused(planned, tmp_path):
    for words, said in (
        (URL, "teacher.top_k is not set"),
        (TOP, "teacher.url is not set"),
        (("--teacher.url", "localhost:8000", *TOP), "give an address such as http://localhost:8000"),
        ((*URL, *TOP, "--teacher.cache", "folder"), "teacher.cache is folder"),
        ((*URL, *TOP, "--method", "minilmv2", "--minilmv2.relation_heads", "4"), "method minilmv2 needs more of its"),
        ((*URL, "--teacher.top_k", "1024"), "teacher.top_k is 1024, but teacher and student share 1024 tokens"),
    ):
        refuses(said, planned, *words)
    said = "fills a cache with the 20 most likely tokens of teacher.top_k: leave --cache"
    for settings in (CacheConfig(engine="vllm"), CacheConfig(content="top_k", top_k=19)):
        refuses(said, make_cache, *planned(*URL, *TOP), settings, tmp_path / "cache")


def test_vllm_is_refused_where_it_cannot_give_what_is_kept(planned, monkeypatch):
    install(monkeypatch)
    for words, settings, said in (
        ((), CacheConfig(), "vLLM gives no hidden states; take --cache.content top_k, or --cache.engine hf"),
        (("--kd.temperature", "2"), TOP_K, "the mass of the rest at temperature 2 does not follow from vLLM's answers"),
        (("--method", "makd"), TOP_K, "method makd needs more of its teacher than log-probabilities"),
        (("--data.max_length", "512"), TOP_K, "generates a token after the 512 of data.max_length"),
    ):
        plan, _ = planned(*words)
        assert engine_of(plan, settings) == "hf"
        with pytest.raises(UserError, match=f"--cache.engine vllm: .*{said}"):
            engine_of(plan, replace(settings, engine="vllm"))
