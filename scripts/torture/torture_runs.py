"""What is tortured: commands on tiny models, each in a folder of its own, and what an undisturbed one leaves.

Ranks are forked from processes that have imported everything (tests/rank_server.py), so that a run costs seconds.
"""

from __future__ import annotations

import json
import os
import queue
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import psutil
from torture_child import Fault
from torture_results import differences

from support import MAIN_JOB, PATIENCE, ROOT, RankServer, logged

CHILD = str(ROOT / "scripts" / "torture" / "torture_child.py")
CLI = "llmdistill.cli"
NOISE = 1e-5
"""Largest relative difference of two fp32 results of two ranks."""


@dataclass(frozen=True)
class Scenario:
    """A command that is disturbed and repeated."""

    name: str
    program: str
    words: str
    """Its arguments, in which {folder} stands for its folder, and {shop...} for what the shop has."""
    phases: tuple[str, ...]
    """Those of torture_child.MARKS that it comes through and for which it is taken."""
    ranks: tuple[int, ...] = (1, 2)
    """Numbers of ranks with which it runs; 0 without a launcher."""
    served: str = ""
    """The folder of the shop that a stand-in for vLLM's server serves meanwhile, at {url}."""


@dataclass
class Done:
    code: int
    output: str
    errors: str
    struck: str | None
    """Where the fault struck; None if it did not."""
    grace: float
    """Seconds from the fault to the end of the last process."""

    @property
    def said(self) -> str:
        return self.output + self.errors

    @property
    def reason(self) -> str:
        lines = [line for line in self.said.splitlines() if line.strip()]
        errors = [line for line in lines if "rror" in line]
        return f"exit code {self.code}: {(errors or lines or ['nothing was printed'])[-1][:300]}"


class Shop:
    """The place of work: processes to fork from, models, data, and the references."""

    def __init__(self, folder: Path, *, seed: int, servers: Sequence[RankServer] = (), workers: int = 1) -> None:
        self.folder, self.seed = folder, seed
        self.workers = workers
        self._own = [] if servers else [RankServer(_made(folder / f"server-{n}")) for n in range(workers)]
        self._free: queue.Queue[RankServer] = queue.Queue()
        for server in (*servers, *self._own):
            self._free.put(server)
        self._references: dict[tuple[str, int], Path] = {}
        self._lock = threading.RLock()
        from tiny import save_decoder  # after --help, as it loads torch

        self.teacher = save_decoder(folder / "teacher")
        self.settings = f"--teacher.model={self.teacher} {_SETTINGS}"

    @property
    def student(self) -> Path:
        return self.reference(SCENARIOS["train"], 1) / "run" / "student"

    @property
    def untrained(self) -> Path:
        return self.student.with_name("untrained")

    def close(self) -> None:
        for server in self._own:
            server.close()

    def random(self, section: str, number: int) -> random.Random:
        """The dice of a case, which do not depend on the cases before it."""
        return random.Random(f"{self.seed}/{section}/{number}")

    def run(
        self,
        scenario: Scenario,
        folder: Path,
        *,
        ranks: int,
        fault: Fault | None = None,
        more: Sequence[str] = (),
        watch: Callable[[int], None] | None = None,
        seconds: float = PATIENCE,
    ) -> Done:
        """Run a scenario's command in its folder; beside it FOLDER.fault tells what the fault did.

        `watch` is called with the number of its process group when it has started. Raises AssertionError if it does not
        end in time, RuntimeError if one of its processes does not.
        """
        own = _made(folder.parent / f"{folder.name}.fault")
        armed = replace(fault or Fault(), folder=str(own), watched=str(folder))
        (own / "fault.json").write_text(json.dumps(asdict(armed)))
        (own / "struck").unlink(missing_ok=True)
        from stand_in_server import serving  # after --help, as it loads torch

        with serving(getattr(self, scenario.served)) if scenario.served else nullcontext() as stand_in:
            if armed.kind == "server":
                stand_in.lives = armed.call
            url = stand_in.url if scenario.served else ""
            arguments = scenario.words.format(shop=self, folder=folder, url=url).split()
            server = self._free.get()
            try:
                words = [str(own / "fault.json"), scenario.program, *arguments, *more]
                job = server.start(words, ranks=ranks, program=CHILD, folder=ROOT)
                if watch is not None:
                    watch(job.group)
                try:
                    ended = job.wait(seconds)
                except AssertionError:
                    server.receive()  # the code of the job, which it has killed
                    raise
                _, left = psutil.wait_procs(alive(job.group), timeout=60)
                if left:
                    raise RuntimeError("processes did not end within 60 seconds after their launcher's end")
            finally:
                for process in alive(job.group):
                    process.kill()
                self._free.put(server)
        now = time.time()
        struck = json.loads((own / "struck").read_text()) if (own / "struck").is_file() else [None, now]
        if scenario.served and stand_in.died is not None:
            struck = [f"answer {armed.call}", stand_in.died]
        # What orphans say comes after the job's end.
        texts = [file.read_text() if file.is_file() else "" for file in (job.output, job.errors)]
        return Done(ended.returncode, *texts, struck[0], now - struck[1])

    def changes(self, scenario: Scenario, ranks: int, rank: int) -> list[str]:
        """All changes that a rank makes in an undisturbed run's folder."""
        folder = self.reference(scenario, ranks)
        file = folder.with_name(f"{folder.name}.fault") / f"changes-{rank}.json"
        return json.loads(file.read_text()) if file.is_file() else []

    def reference(self, scenario: Scenario, ranks: int) -> Path:
        """The folder of an undisturbed run, which is made at the first call."""
        key = (scenario.name, ranks)
        with self._lock:
            if key not in self._references:
                folder = _made(self.folder / "references" / f"{scenario.name}-{ranks}")
                done = self.run(scenario, folder, ranks=ranks)
                if done.code != 0:
                    raise RuntimeError(f"{scenario.name} on {ranks} ranks fails undisturbed: {done.said[-3000:]}")
                self._references[key] = folder
            return self._references[key]


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


_SETTINGS = (
    "--ds_config ds_configs/zero2.json --student.factorize.rank=6 --data.train=embedded:train "
    "--data.max_prompt_length=96 --data.max_length=104 --data.tests.seen=embedded:seen "
    "--train.steps=5 --train.global_batch_size=4 --train.learning_rate=1e-3 --train.save_every=2 "
    "--train.log_every=1 --train.dtype=fp32 --scoring.limit=4 --scoring.decoding=greedy --scoring.batch_size=4"
)
_TRAIN = "{shop.settings} --scoring.models=[student] --output_dir={folder}/run"
_WEIGHTED = (
    "{shop.settings} --student.factorize.rank=null --student.factorize.target_params=85% "
    "--student.factorize.weighting=gradients --student.factorize.allocation=loss "
    "--student.factorize.calibration.examples=8 "
    "--student.factorize.calibration.folder={folder}/cal --scoring.models=[] --train.steps=2 --output_dir={folder}/run"
)
_CACHE = "cache {shop.settings} --method=kd --scoring.models=[] --cache.shard_tokens=20000 --output={folder}/cache"
_GENERATE = (
    "generate --model={shop.teacher} --data embedded:train --limit 48 --batch_size 4 --max_prompt_length 128 "
    "--max_length 144 --dtype fp32 --engine=hf --output={folder}/answers.jsonl"
)
_COMPARE = (
    "compare {shop.settings} --methods=none,sft,seqkd --seeds=1 --learning_rates=1e-3 --train.steps=3 "
    "--output_dir={folder}/study"
)
_OF_KD = "{shop.settings} --method=kd --scoring.models=[] --output_dir={folder}/run"
_REMOTE = f"{_OF_KD} --teacher.url={{url}} --teacher.top_k=20 --teacher.wait=10"
_OWN = f"{_OF_KD} --kd.ratio=1 --data.on_policy=1 --data.rollout.url={{url}} --data.rollout.wait=10"
_EXPORT = "export --to=dense --model={shop.student} --output={folder}/dense"
_PHASES = ("start", "training", "saving", "student", "scoring")
SCENARIOS = {
    each.name: each
    for each in (
        Scenario("train", MAIN_JOB, _TRAIN, _PHASES),
        Scenario("weighted", MAIN_JOB, _WEIGHTED, ("factorizing", "calibrating")),
        Scenario("cache", CLI, _CACHE, ("caching",)),
        Scenario("generate", CLI, _GENERATE, ("generating",)),
        Scenario("compare", CLI, _COMPARE, ("comparing",), (0,)),
        Scenario("export", CLI, _EXPORT, ("exporting",), (0,)),
        Scenario("remote", MAIN_JOB, _REMOTE, ("training",), served="teacher"),
        Scenario("rollout", MAIN_JOB, _OWN, ("training",), served="untrained"),
    )
}


def alive(group: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def verdict(shop: Shop, scenario: Scenario, ranks: int, folder: Path) -> list[str]:
    """What is wrong with a folder after all, against the undisturbed run's; empty if nothing is."""
    wrong = differences(shop.reference(scenario, ranks), folder, noise=NOISE if ranks > 1 else 0.0)
    run = folder / "run"
    if (run / "metrics.jsonl").is_file():
        steps, expected = logged(run, "step"), logged(shop.reference(scenario, ranks) / "run", "step")
        wrong += [f"metrics.jsonl has the steps {steps}"] if steps != expected else []
    return wrong
