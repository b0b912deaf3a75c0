"""gpu_check: what its parts compare, how their processes end, and what the report says of them."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
import time
import warnings
from functools import partial
from pathlib import Path

import gpu_check
import gpu_check_kernels
import gpu_check_parts
import gpu_check_waits
import pytest
import torch
from benching import said
from benching_table import Line
from gpu_check_parts import PARTS, Part, Request
from gpu_check_report import Report, Result, holds

pytestmark = pytest.mark.tools

SCRIPTS = Path(gpu_check.__file__).parent
CPU = torch.device("cpu")
TINY = gpu_check_kernels.Sizes(tokens=8, rows=4, vocabulary=40, width=16)


def test_command_line(monkeypatch, capsys):
    for words, code in ((["--help"], 0), (["--only", "nonsense"], 2), (["--device", "tpu"], 2), (["--ranks", "0"], 2)):
        monkeypatch.setattr(sys, "argv", ["gpu_check.py", *words])
        with pytest.raises(SystemExit) as exit_:
            gpu_check.main()
        assert exit_.value.code == code, words
    assert "under 9 minutes" in capsys.readouterr().out


def test_all_parts_together_take_less_than_nine_minutes():
    rows = [row for stage in gpu_check_parts.STAGES for row in stage]
    assert sorted(name for row in rows for name in row) == sorted(PARTS)
    stages = [max(sum(PARTS[name].seconds for name in row) for row in rows) for rows in gpu_check_parts.STAGES]
    assert sum(stages) + len(stages) * gpu_check.GRACE < 9 * 60


# What the parts compare


def test_losses_are_those_of_fp64_and_the_missing_kernels_are_named():
    why, *lines = gpu_check_kernels.kernels(gpu_check_kernels.SMALL, CPU)
    assert why == "Triton's kernels: no GPU; the losses in blocks stand for them"
    assert len(lines) == 30
    assert all(holds(line) for line in lines)
    assert all(line.value > 0 for line in lines), "a loss is compared with itself"


def test_a_wrong_loss_and_a_gradient_that_is_not_a_number_are_found(monkeypatch):
    right = gpu_check_kernels.attention.attention_kl

    def wrong(*given, **named):
        found = right(*given, **named)
        return found._replace(sum=1.05 * found.sum)

    make = partial(gpu_check_kernels._attention_kl, 20, 64, "student_teacher")
    monkeypatch.setattr(gpu_check_kernels.attention, "attention_kl", wrong)
    found = gpu_check_kernels.differences(make, torch.float32, CPU)
    assert found == pytest.approx((0.05, 0.05), abs=1e-4)
    monkeypatch.setattr(gpu_check_kernels, "difference", lambda found, _: float("nan") if found.dim() else 0.0)
    assert not any(holds(line) for line in gpu_check_kernels.kernels(TINY, CPU) if isinstance(line, Line))


def test_waits_of_a_gpu_are_the_places_that_torch_warns_of(monkeypatch):
    modes = ["default"]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def look_at_a_value() -> None:
        warnings.warn("called a synchronizing CUDA operation (Triggered internally ...)", stacklevel=1)
        warnings.warn("something else", stacklevel=1)

    with gpu_check_waits.watch(torch.device("cuda")) as places:
        for _ in range(2):
            look_at_a_value()
    (place,) = places
    assert any(frame.endswith("test_gpu_check.py:look_at_a_value") for frame in place)
    assert modes == ["default", "warn", "default"]


def test_a_wait_belongs_to_the_innermost_library():
    import deepspeed
    import transformers

    import llmdistill

    ours, theirs, other = (str(Path(str(each.__file__)).parent) for each in (llmdistill, deepspeed, transformers))
    step = (f"{ours}/run/trainer.py:train_step", f"{theirs}/runtime/engine.py:_take_model_step")
    norm = (*step, f"{theirs}/runtime/zero/stage_1_and_2.py:step", "/usr/lib/torch/_tensor.py:item")
    loss = (step[0], f"{ours}/losses/matrix.py:mse", "/usr/lib/torch/_tensor.py:item")
    mask = (step[0], f"{other}/masking_utils.py:mask")
    places = (norm, loss, mask, step[:1], ("/elsewhere/llmdistill/scripts/x.py:main",))
    found = [gpu_check_waits.origin(place) for place in places]
    assert found == ["deepspeed", "llmdistill/losses", "transformers", "llmdistill", None]
    assert [gpu_check_waits.is_norm(place) for place in (norm, step, norm[2:], loss)] == [True, True, False, False]
    assert gpu_check_waits.shown(loss) == "llmdistill/losses/matrix.py:mse"


def test_figures_of_a_bench_are_lines_without_limits(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(gpu_check_parts, "ROOT", tmp_path)
    script = tmp_path / "scripts" / "bench" / "bench_step.py"
    script.parent.mkdir(parents=True)
    script.write_text("import json, sys\nprint('a table')\nprint(json.dumps({'kd_step': {'words': sys.argv[1:]}}))\n")
    found = gpu_check_parts.bench(Request(CPU, small=True), "bench_step.py", "--only", "kd")
    assert found["kd_step"]["words"] == ["--device", "cpu", "--quick", "--repeats", "1", "--only", "kd"]
    assert "a table" in capfd.readouterr().out
    with pytest.raises(RuntimeError, match="TRL's row failed"):
        list(gpu_check_parts.trl(Request(CPU, small=True)))
    script.write_text("raise SystemExit(3)")
    with pytest.raises(RuntimeError, match="ended with 3"):
        gpu_check_parts.bench(Request(CPU, small=True), "bench_step.py")
    nested = {"kd_step": {"time_over_floor": 0.9, "supervised_40": {"time_over_floor": None}}}
    first, second = gpu_check_parts.figures(nested)
    assert (first.measure, first.value, first.target) == ("kd step: time over floor", 0.9, None)
    assert second.measure == "kd step, supervised 40: time over floor"
    assert str(second.value) == "nan"


MARKED = """
    import pytest

    @pytest.mark.skipif(False, reason="needs a GPU")
    @pytest.mark.parametrize("n", [1, 2])
    def test_marked(n):
        assert n == 1

    def test_unmarked():
        assert False
"""


@pytest.mark.parametrize(("only_marked", "failed"), [(True, 1), (False, 2)])
def test_tests_that_need_a_gpu_are_chosen_by_their_reason(only_marked, failed, tmp_path):
    file = tmp_path / "test_some.py"
    file.write_text(textwrap.dedent(MARKED))
    ended, passed = gpu_check_parts.run_tests([file], only_marked=only_marked)
    assert (ended.value, passed.value) == (failed, 1)
    assert ended.detail.startswith("1 passed, 0 skipped, test_some.py::test_marked[2]")
    (nothing, _) = gpu_check_parts.run_tests([tmp_path / "test_none.py"], only_marked=only_marked)
    assert not holds(nothing), "tests that cannot be run are no tests that hold"


# Processes and results


def arguments_of(**more: object) -> argparse.Namespace:
    return argparse.Namespace(**{"device": "cpu", "small": True, "ranks": 1, "patience": 1.0, **more})


def tells(value: float | None) -> str:
    return f"print({said({'measure': 'm', 'value': value, 'target': 1.0, 'detail': 'd'})!r}, flush=True)\n"


def leaves_out(text: str) -> str:
    return f"print({said({'left_out': text})!r})\n"


PROGRAMS = {
    "good": tells(0.5) + leaves_out("the other half"),
    "over": tells(1.5),
    "spoiled": tells(None),
    "broken": tells(0.5) + "raise ValueError('out of luck')",
    "slow": tells(0.5) + "import subprocess; subprocess.run(['sleep', '60'])",
    "idle": leaves_out("all of it"),
}


@pytest.fixture
def small_parts(monkeypatch):
    """Parts that take no time to speak of, in the place of the real ones."""

    def command(name: str, _: argparse.Namespace) -> list[str]:
        return [sys.executable, "-c", PROGRAMS[name]]

    parts = {name: Part(about="about", look=lambda _: iter(()), seconds=60) for name in PROGRAMS}
    parts["slow"] = Part(about="about", look=lambda _: iter(()), seconds=1)
    parts["absent"] = Part(about="about", look=lambda _: iter(()), seconds=60, needs=("torch", "no_such_module"))
    parts["on a GPU"] = Part(about="about", look=lambda _: iter(()), seconds=60, gpu_only=True)
    monkeypatch.setattr(gpu_check, "PARTS", parts)
    monkeypatch.setattr(gpu_check, "STAGES", ((("slow", "good"), ("over", "spoiled", "broken")), (tuple(parts)[5:],)))
    monkeypatch.setattr(gpu_check, "part_command", command)
    return parts


def test_no_part_stops_another_and_each_is_reported(small_parts, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu_check, "GRACE", 1.0)
    report = Report(tmp_path, "the | command", "cpu", 1, list(small_parts))
    gpu_check.Runner(arguments_of()).run_stages(list(small_parts), report)
    states = {name: (result.state, result.why) for name, result in report.results.items()}
    assert states == {
        "slow": ("out of time", "it was ended after 1 s"),
        "good": ("ok", ""),
        "over": ("failed", "1 over the limit: m"),
        "spoiled": ("failed", "1 over the limit: m"),
        "broken": ("failed", "exit code 1: ValueError: out of luck"),
        "idle": ("left out", "all of it"),
        "absent": ("left out", "no_such_module not installed"),
        "on a GPU": ("left out", "there is no GPU"),
    }
    assert [name for name, result in report.results.items() if result.failed] == ["slow", "over", "spoiled", "broken"]
    written = json.loads((tmp_path / "gpu_check.json").read_text())
    assert {name: part["state"] for name, part in written["parts"].items()} == {k: v[0] for k, v in states.items()}
    assert written["parts"]["slow"]["lines"][0]["value"] == 0.5, "what it had told before its end is lost"
    assert written["parts"]["spoiled"]["lines"][0] == {
        **{"measure": "m", "value": None, "target": 1.0, "detail": "d", "unit": "", "at_least": False},
        "holds": False,
    }
    assert "ValueError: out of luck" in written["parts"]["broken"]["log"]
    assert written["versions"]["torch"] == torch.__version__
    page = (tmp_path / "gpu_check.md").read_text()
    assert "| good | m | 0.5 | ≤ 1 | ok | d |\n| good | left out: the other half | – |  |  |  |" in page
    assert "| over | m | 1.5 | ≤ 1 | **no** | d |" in page
    assert "| absent | left out: no_such_module not installed | – |  |  |  |" in page
    assert "**Warning: broken: failed: exit code 1: ValueError: out of luck**" in page
    assert "There is no GPU here" in page
    assert "over the limit: m" in capsys.readouterr().out


def test_output_of_a_process_that_was_ended_in_a_line(small_parts):
    part = small_parts["good"]
    whole = said({"measure": "m", "value": 0.5, "target": 1.0, "detail": ""})
    found = gpu_check.read_result(part, ["Loading: 100%|##" + whole, "noise", whole[:-9]], code=-15, late=9.0)
    assert [line.value for line in found.lines] == [0.5]
    assert found.why == "it was ended after 9 s"
    assert gpu_check.read_result(part, ["noise"], code=0, late=None).state == "failed"


def test_a_part_gets_the_time_that_the_one_before_it_leaves(small_parts, tmp_path, monkeypatch):
    limits = {}

    def run(self: object, name: str, limit: float) -> Result:
        limits[name] = limit
        return Result("ok", "about", seconds={"over": 50.0, "spoiled": 500.0}.get(name, 1.0))

    monkeypatch.setattr(gpu_check.Runner, "run", run)
    report = Report(tmp_path, "command", "cpu", 1, list(small_parts))
    gpu_check.Runner(arguments_of(patience=2.0)).run_stages(["over", "spoiled", "broken"], report)
    assert limits == {"over": 120.0, "spoiled": 120.0 - 50.0 + 120.0, "broken": 120.0}


def test_an_interrupt_ends_what_runs(small_parts, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "GRACE", 1.0)
    report = Report(tmp_path, "command", "cpu", 1, list(small_parts))
    runner = gpu_check.Runner(arguments_of(patience=100.0))

    def interrupt(self: object, *_: object) -> None:
        while not runner._running:
            time.sleep(0.05)
        raise KeyboardInterrupt

    class Future:
        result = interrupt

    class Pool(gpu_check.ThreadPoolExecutor):
        def submit(self, *given: object, **named: object) -> Future:  # type: ignore[override]
            super().submit(*given, **named)  # type: ignore[arg-type]
            return Future()

    monkeypatch.setattr(gpu_check, "ThreadPoolExecutor", Pool)
    with pytest.raises(KeyboardInterrupt):
        runner.run_stages(["slow", "good"], report)
    assert list(report.results) == ["slow"], "nothing more begins"
    assert report.results["slow"].failed, "it ran to its end"
    assert list(json.loads((tmp_path / "gpu_check.json").read_text())["parts"]) == ["slow"], "written only at the end"


def test_exit_code(small_parts, tmp_path, monkeypatch):
    for names, code in ((["good", "absent"], 0), (["over"], 1)):
        words = [word for name in names for word in ("--only", name)]
        monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--device", "cpu", "--output", str(tmp_path), *words])
        monkeypatch.setattr(gpu_check.signal, "signal", lambda *_: None)
        assert gpu_check.main() == code


def test_parts_under_deepspeed_have_a_rank_for_each_gpu():
    alone = gpu_check.part_command("kernels", arguments_of(device="cuda", small=False, ranks=4))
    assert alone[1:] == [str(SCRIPTS / "gpu_check.py"), "--part", "kernels", "--device", "cuda"]
    together = gpu_check.part_command("zero", arguments_of(ranks=4))
    assert together[1:6] == ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "4"]
    assert together[6:] == [str(SCRIPTS / "gpu_check.py"), "--part", "zero", "--device", "cpu", "--small"]


def test_a_part_tells_its_lines_as_they_come(monkeypatch, capsys):
    def look(_: Request):
        yield Line("m", float("nan"), 1.0, "d")
        yield "the rest"
        raise ValueError

    monkeypatch.setitem(PARTS, "kernels", Part(about="", look=look, seconds=1))
    with pytest.raises(ValueError):  # noqa: PT011  # the one above
        gpu_check.look("kernels", Request(CPU, small=True))
    told = [gpu_check.heard(line) for line in capsys.readouterr().out.splitlines()]
    assert told[0]["value"] is None
    assert told[1:] == [{"left_out": "the rest"}]
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ValueError):  # noqa: PT011
        gpu_check.look("kernels", Request(CPU, small=True))
    assert capsys.readouterr().out == ""
