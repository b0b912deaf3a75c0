"""A cache that a server fills, and the settings that a teacher behind a server refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from caches import TOP_K, WORLD, batches, cached, checked, losses
from stand_in_server import serving

from llmdistill.config.cache import CacheConfig
from llmdistill.config.command_line import parse_run
from llmdistill.errors import UserError
from llmdistill.methods import METHODS
from llmdistill.run import cache
from llmdistill.run.describe import estimate, headline
from llmdistill.run.teachers import remote_teacher

URL = "http://127.0.0.1:1"
TOP = ("--teacher.top_k", "20")
WORDS = ("--method", "kd", "--data.packing", "true")


def test_a_server_writes_the_likely_tokens_that_the_teacher_writes(planned, made, files, tmp_path, monkeypatch):
    expected = made(*WORDS, settings=replace(TOP_K, engine="hf"))
    monkeypatch.setattr(cache, "make_teacher", lambda *_: pytest.fail("the server has the teacher"))
    with serving(files["teacher"]) as server:
        words = (*WORDS, "--teacher.url", server.url, *TOP)
        plan, data = planned(*words)
        record = cache.make_cache(plan, data, CacheConfig(micro_batch_size=4), tmp_path / "cache", WORLD)
        assert len(server.asked) == record["examples"] + 1 == 26  # equal examples once, and the check's own
        found = batches(plan, data)
        asked = losses(plan, remote_teacher(plan, WORLD), found)
    assert (record["held"]["top_k"], record["settings"]["content"]) == (20, "top_k")
    checked(planned, tmp_path / "cache", *WORDS)
    for folder in (expected, tmp_path / "cache"):
        torch.testing.assert_close(asked, losses(plan, cached(plan, folder), found), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("settings", [CacheConfig(engine="vllm"), CacheConfig(content="top_k", top_k=19)])
def test_a_cache_of_a_server_has_its_number_of_tokens(planned, tmp_path, settings):
    said = r"fills a cache with the 20 most likely tokens of teacher.top_k: leave --cache"
    with pytest.raises(UserError, match=said):
        cache.make_cache(*planned("--teacher.url", URL, *TOP), settings, tmp_path / "cache", WORLD)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--method", "minilmv2", "--minilmv2.relation_heads", "4"], "method minilmv2 needs more of its teacher"),
        (["--teacher.top_k", "1024"], "teacher.top_k is 1024, but teacher and student share 1024 tokens"),
    ],
)
def test_what_a_server_cannot_give_is_refused(planned, words, said):
    with pytest.raises(UserError, match=said):
        planned("--teacher.url", URL, *TOP, *words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--teacher.url", URL], "teacher.top_k is not set"),
        (TOP, "teacher.url is not set"),
        (["--teacher.url", "localhost:8000", *TOP], "give an address such as http://localhost:8000"),
        (["--teacher.url", URL, *TOP, "--teacher.cache", "folder"], "teacher.cache is folder"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(words, said):
    with pytest.raises(UserError, match=said):
        parse_run(["--recipe", "quickstart", "--method", "kd", *words], METHODS)


def test_a_plan_names_the_server_and_does_not_count_the_teacher(planned):
    remote, live = (planned(*words)[0] for words in ((*WORDS, "--teacher.url", URL, *TOP), WORDS))
    assert f"asked at {URL}; it is not scored" in headline(remote, "")
    assert estimate(remote)["flops"] < estimate(live)["flops"]
