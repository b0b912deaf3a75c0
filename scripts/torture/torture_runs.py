"""What is tortured: commands on tiny models, each in a folder of its own, and what an undisturbed one leaves.

Ranks are forked from processes that have imported everything (tests/rank_server.py), so that a run costs seconds.
"""

from __future__ import annotations

import json
import queue
import random
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from stand_in_server import serving
from tiny import save_decoder
from torture_child import Fault
from torture_results import differences

from support import MAIN_JOB, ROOT, RankServer

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

    def __init__(self, folder: Path, servers: Sequence[RankServer], *, seed: int) -> None:
        self.folder, self.seed = folder, seed
        self._free: queue.Queue[RankServer] = queue.Queue()
        for server in servers:
            self._free.put(server)
        self._references: dict[tuple[str, int], Path] = {}
        self._lock = threading.RLock()
        self.teacher = save_decoder(folder / "teacher")
        self.settings = f"--teacher.model={self.teacher} {_SETTINGS}"

    @property
    def student(self) -> Path:
        return self.reference(SCENARIOS["train"], 1) / "run" / "student"

    @property
    def untrained(self) -> Path:
        return self.student.with_name("untrained")

    @contextmanager
    def server(self) -> Iterator[RankServer]:
        """A server that runs nothing else within the block; waits until there is one."""
        server = self._free.get()
        try:
            yield server
        finally:
            self._free.put(server)

    def random(self, section: str, number: int) -> random.Random:
        """The dice of a case, which do not depend on the cases before it."""
        return random.Random(f"{self.seed}/{section}/{number}")

    def run(self, scenario: Scenario, folder: Path, *, ranks: int, fault: Fault | None = None) -> Done:
        """Run a scenario's command in its folder; FOLDER.fault beside it tells what the fault did.

        Raises AssertionError if it does not end in time.
        """
        fault = fault or Fault()
        own = folder.with_name(f"{folder.name}.fault")
        own.mkdir(exist_ok=True)
        (own / "fault.json").write_text(json.dumps(asdict(fault)))
        (own / "struck").unlink(missing_ok=True)
        with serving(getattr(self, scenario.served)) if scenario.served else nullcontext() as stand_in:
            if fault.kind == "server":
                stand_in.lives = fault.call
            url = stand_in.url if scenario.served else ""
            words = [str(own / "fault.json"), scenario.program]
            words += scenario.words.format(shop=self, folder=folder, url=url).split()
            with self.server() as server:  # which waits for all processes of the job
                done = server.run(words, ranks=ranks, program=CHILD)
        now = time.time()
        struck = json.loads((own / "struck").read_text()) if (own / "struck").is_file() else [None, now]
        if scenario.served and stand_in.died is not None:
            struck = [f"answer {fault.call}", stand_in.died]
        return Done(done.returncode, done.stdout, done.stderr, struck[0], now - struck[1])

    def changes(self, scenario: Scenario, ranks: int, rank: int) -> list[str]:
        """All changes that a rank makes in an undisturbed run's folder."""
        folder = self.reference(scenario, ranks)
        return json.loads((folder.with_name(f"{folder.name}.fault") / f"changes-{rank}.json").read_text())

    def verdict(self, scenario: Scenario, ranks: int, folder: Path) -> list[str]:
        """What is wrong with a folder after all, against the undisturbed run's; empty if nothing is."""
        return differences(self.reference(scenario, ranks), folder, noise=NOISE if ranks > 1 else 0.0)

    def reference(self, scenario: Scenario, ranks: int) -> Path:
        """The folder of an undisturbed run, which is made at the first call."""
        key = (scenario.name, ranks)
        with self._lock:
            if key not in self._references:
                folder = self.folder / "references" / f"{scenario.name}-{ranks}"
                folder.mkdir(parents=True)
                done = self.run(scenario, folder, ranks=ranks)
                if done.code != 0:
                    raise RuntimeError(f"{scenario.name} on {ranks} ranks fails undisturbed: {done.said[-3000:]}")
                self._references[key] = folder
            return self._references[key]


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
