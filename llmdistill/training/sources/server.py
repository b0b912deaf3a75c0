"""A teacher that a server runs (teacher.url)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llmdistill.config.cache import CacheConfig
from llmdistill.config.teacher import TeacherConfig
from llmdistill.errors import UserError
from llmdistill.runtime.distributed import World, on_main
from llmdistill.teachers.remote import RemoteTeacher, TeacherServer
from llmdistill.training.checks import number_beyond_vllm
from llmdistill.training.sources.entry import TeacherSource

if TYPE_CHECKING:
    from llmdistill.training.plan import Plan


class ServerSource(TeacherSource):
    """Asks a server for the most likely tokens of the teacher."""

    def is_chosen(self, teacher: TeacherConfig) -> bool:
        return teacher.url is not None

    def build(self, plan: Plan) -> RemoteTeacher:
        return RemoteTeacher(self.client(plan), device=World.current().device)

    def client(self, plan: Plan) -> TeacherServer:
        """Return the client of the server."""
        teacher, vocabulary = plan.config.teacher, plan.models.compared_tokens
        assert teacher.url is not None
        assert teacher.model is not None
        assert teacher.top_k is not None
        return TeacherServer(teacher.url, teacher.model, k=teacher.top_k, vocabulary=vocabulary, wait=teacher.wait)

    def describe(self, teacher: TeacherConfig) -> str:
        return f", asked at {teacher.url}; it is not scored"

    def check_plan(self, plan: Plan) -> None:
        teacher, tokens = plan.config.teacher, plan.models.compared_tokens
        obstacle = number_beyond_vllm(plan, remedy="train with the teacher itself (teacher.url and teacher.top_k null)")
        if obstacle is not None:
            raise UserError(f"teacher.url {teacher.url}: {obstacle}")
        if teacher.top_k is not None and teacher.top_k >= tokens:
            raise UserError(
                f"teacher.top_k is {teacher.top_k}, but teacher and student share {tokens} tokens: give less"
            )

    def check_there(self, plan: Plan) -> tuple[str, str]:
        self.client(plan).check(plan.config.data.max_length)
        return "teacher.url", "the server has the model, and gives its log-probabilities"

    def unforecast(self, teacher: TeacherConfig) -> str:
        return (
            f"teacher.url is {teacher.url}, and what a server costs is not forecast: leave teacher.url and "
            "teacher.top_k out"
        )

    def cache_settings(self, plan: Plan, settings: CacheConfig) -> CacheConfig:
        top_k = plan.config.teacher.top_k  # the server's answers fill the cache
        assert top_k is not None
        if settings.engine != "auto" or settings.kept_top_k not in (None, top_k):
            raise UserError(
                f"teacher.url {plan.config.teacher.url} fills a cache with the {top_k} most likely tokens of "
                "teacher.top_k: leave --cache.engine, --cache.content and --cache.top_k out"
            )
        on_main(lambda: self.check_there(plan))
        return replace(settings, content="top_k", top_k=top_k, engine="vllm")

    def scorer(self, plan: Plan) -> Callable[..., Any]:
        return self.client(plan).score
