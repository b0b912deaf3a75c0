"""docs/extending.md: its code is run as it stands there, and does what the page says."""

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_model

import llmdistill
from llmdistill import DistillationLoss, train
from llmdistill.batch import TopK
from llmdistill.cli import main
from llmdistill.config import StudentConfig, TeacherConfig
from llmdistill.config.command_line import parse_run
from llmdistill.config.student import QuantizeConfig
from llmdistill.errors import FieldError, UserError
from llmdistill.losses import DIVERGENCES, REVERSE_KL, TokenTerm
from llmdistill.losses.top_k import soften
from llmdistill.methods import METHODS, Method, Terms
from llmdistill.methods.kd import KdConfig
from llmdistill.models.families import FAMILIES
from llmdistill.models.forms import FORMS, chosen_forms
from llmdistill.models.load import load_model
from llmdistill.models.student_form import StudentForm
from llmdistill.step.taps import Recorder
from llmdistill.tasks import TASKS
from llmdistill.tasks.glue import GLUE_TASKS
from llmdistill.teachers.choice import TEACHERS, Capabilities, TeacherSource, source_of
from llmdistill.teachers.translated import TranslatedSource
from llmdistill.training.plan import make_plan

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/extending.md").read_text(encoding="utf-8")


def blocks(section: str, kind: str) -> list[str]:
    """The fenced blocks of a kind under a heading."""
    text = PAGE.split(f"\n## {section}\n", 1)[1].split("\n## ", 1)[0]
    return re.findall(rf"^```{kind}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def run_block(section: str) -> dict[str, Any]:
    """Run the block under a heading that is no file, and return its names."""
    names: dict[str, Any] = {}
    exec(compile(blocks(section, "python")[1], "extending.md", "exec"), names)
    return names


@pytest.fixture
def script(monkeypatch):
    """Run the command of a section with more arguments; it ends with this exit code."""

    def run(section: str, *more: str, code: int = 0, alone: bool = False) -> None:
        _, name, *arguments = shlex.split(blocks(section, "console")[0])
        monkeypatch.setattr(sys, "argv", [name, *([] if alone else arguments), *more])
        with pytest.raises(SystemExit, match=str(code)):
            runpy.run_path(name, run_name="__main__")

    return run


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder of a user's own, with the page's files in it; the tables are as before afterwards."""
    tables = METHODS, DIVERGENCES, FAMILIES, TASKS, GLUE_TASKS, TEACHERS, FORMS
    before = [dict(table) for table in tables]
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for code in re.findall(r"^```python\n(# \w+\.py\n.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        (tmp_path / code.split()[1]).write_text(code, encoding="utf-8")
    yield tmp_path
    for table, entries in zip(tables, before, strict=True):
        table.clear()
        table.update(entries)
    for name in ("hellinger", "mine", "norms", "olmo3", "parity", "pruned", "wise"):
        sys.modules.pop(name, None)


def test_a_method_of_ones_own_on_the_command_line(script, capsys):
    script("A method", "--json")
    plan = json.loads(capsys.readouterr().out)
    assert plan["terms"] == {"last": 2.0, "label": 1.0}
    assert plan["config"]["last"] == {"hidden": 2.0}

    script("A method", "--help", "all", alone=True)
    assert "last: the last layers' outputs, and the labels" in " ".join(capsys.readouterr().out.split())

    script("A method", "--last.hiden", "2.0", code=2)
    assert "did you mean --last.hidden?" in capsys.readouterr().err


def test_a_method_of_ones_own_in_a_run():
    history = run_block("A method")["result"].history
    assert len(history) == 10
    for row in history:
        assert row["loss"] == pytest.approx(2 * row["last"] + row["label"], rel=1e-4)
    assert history[-1]["last"] < history[0]["last"]


def test_a_term_of_ones_own_is_plain_torch_on_the_taps():
    import mine

    teacher, student = (tiny_model("llama", scale=scale) for scale in (3.0, 2.0))
    ids = torch.arange(2, 26).view(2, 12)
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}

    outputs = []
    handles = [
        m.model.layers[-1].register_forward_hook(lambda *call: outputs.append(call[-1])) for m in (teacher, student)
    ]
    logits = [model(ids, attention_mask=mask).logits for model in (teacher, student)][1]
    for handle in handles:
        handle.remove()
    gap = (outputs[1] - outputs[0].detach()).square().mean(-1)[mask == 1].mean()
    label = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    weight = student.model.embed_tokens.weight
    (expected,) = torch.autograd.grad(3 * gap + label, weight)

    loss = DistillationLoss(teacher, student, "last", hidden=3.0)
    result = loss(batch)
    loss.remove()
    torch.testing.assert_close(result.terms["last"], gap.detach())
    torch.testing.assert_close(result.loss.detach(), (3 * gap + label).detach())
    torch.testing.assert_close(torch.autograd.grad(result.loss, weight)[0], expected, rtol=0, atol=1e-5)
    assert mine.last_term(1, 1).student == {("hidden", 1)}


def test_a_divergence_of_ones_own_is_chosen_by_its_name():
    names = run_block("A divergence")
    history = names["result"].history
    assert len(history) == 10
    for row in history:
        assert row["loss"] == pytest.approx(0.5 * row["hellinger"] + 0.5 * row["label"], rel=1e-4)
    assert history[-1]["loss"] < history[0]["loss"]
    log_p, log_q = torch.randn(2, 3, 5).log_softmax(-1)
    value = DIVERGENCES["hellinger"].build(METHODS["kd"].defaults()).value(log_p, log_q)
    torch.testing.assert_close(value, 0.5 * (log_p.mul(0.5).exp() - log_q.mul(0.5).exp()).square().sum(-1))
    with pytest.raises(ValueError, match=r"kd\.divergence is helinger: give one of .*log_ratio, hellinger"):
        KdConfig(divergence="helinger")


def test_a_teacher_of_ones_own_is_learned_from(capfd):
    names = run_block("A teacher")
    assert "its outputs come from wise; it is not scored" in capfd.readouterr().out
    history = names["result"].history
    assert len(history) == 10
    assert history[-1]["forward_kl"] < history[0]["forward_kl"]
    with pytest.raises(UserError, match=r"teacher\.source wize: .*did you mean wise"):
        source_of(TeacherConfig(source="wize"))


def test_settings_of_ones_own_teacher_are_checked():
    sys.modules.pop("wise", None)
    from wise import WISE

    assert WISE.settings_of(TeacherConfig(source="wise", settings={"right": 0.5})).right == 0.5
    assert WISE.settings_of(TeacherConfig(source="wise")).right == 0.9
    with pytest.raises(UserError, match=r"teacher\.settings\.rihgt: .*did you mean teacher\.settings\.right"):
        WISE.settings_of(TeacherConfig(source="wise", settings={"rihgt": 0.5}))
    with pytest.raises(UserError, match=r"teacher\.settings\.right.*half"):
        WISE.settings_of(TeacherConfig(source="wise", settings={"right": "half"}))
    translated = source_of(TeacherConfig(source="wise", settings={"right": 0.5}), translates=True)
    assert translated.settings_of(TeacherConfig(source="wise", settings={"right": 0.25})).right == 0.25
    with pytest.raises(UserError, match=r"teacher\.settings\.k: plain has no settings"):
        TeacherSource().settings_of(TeacherConfig(source="plain", settings={"k": 1}))
    with pytest.raises(FieldError, match=r"settings are those of teacher\.source"):
        TeacherConfig(settings={"right": 0.5})


@pytest.mark.parametrize(
    ("settings", "missing"),
    [
        ("--method makd", "inner tensors of layers"),
        ("--method kd --kd.temperature 2", "the mass of the rest at temperature 2"),
        ("--method kd --kd.divergence log_ratio --kd.ratio 1 --data.on_policy 1", "the probability of each label"),
    ],
)
def test_a_method_that_needs_more_than_a_teacher_of_ones_own_gives_is_refused(settings, missing, capsys):
    __import__("wise")
    words = f"--ds_config zero2 --student.factorize.rank 16 --teacher.source wise --dry_run {settings}"
    assert train.main(shlex.split(words)) == 2
    error = capsys.readouterr().err
    assert f"teacher.source wise: method {shlex.split(settings)[1]} needs {missing}" in " ".join(error.split())
    assert "Traceback" not in error


def test_a_teacher_of_ones_own_that_says_it_gives_more_is_let_through(monkeypatch):
    from wise import WISE

    everything = Capabilities(layers=True, sequences=True, positions=("labels", "tokens"), whole=True)
    monkeypatch.setattr(type(WISE), "gives", everything)
    words = "--ds_config zero2 --student.factorize.rank 16 --teacher.source wise --method makd"
    assert make_plan(parse_run(shlex.split(words), METHODS)[0]).source is WISE


def test_likely_tokens_are_not_enough_for_all_tokens_or_another_tokenizer():
    from wise import WISE

    terms = Terms({"kl": 1.0}, (), [TokenTerm("kl", REVERSE_KL, positions="tokens")])
    assert Capabilities().find_missing(Method(**vars(terms), shift=False)) == "distributions at all tokens"
    words = "--ds_config zero2 --teacher.source wise --method kd --student.factorize.rank 16"
    plan = make_plan(parse_run(shlex.split(words), METHODS)[0])
    WISE.check_plan(plan)
    with pytest.raises(UserError, match=r"teacher\.source wise gives the most likely tokens alone, .*tokenizers"):
        TranslatedSource(WISE).check_plan(plan)


def test_a_teacher_of_likely_tokens_says_which_temperature_it_lacks():
    with pytest.raises(UserError, match=r"temperature 2.* at 1"):
        soften(TopK(torch.zeros(1, 1).long(), torch.zeros(1, 1), {1.0: torch.zeros(1)}), 2.0)


def test_a_callback_of_ones_own_logs_with_each_row():
    names = run_block("A callback")
    norms = [row["weight_norm"] for row in names["result"].history if "weight_norm" in row]
    weights = [weight.detach().float().square().sum() for weight in names["result"].student.parameters()]
    assert len(norms) == 2
    assert norms[-1] == pytest.approx(float(sum(weights).sqrt()), rel=1e-2)  # the student is saved in bf16 or fp32


def test_figures_of_a_callback_of_ones_own_are_in_checkpoints(folder):
    class Steps:
        reads = gives = ()

        def __init__(self, trainer):
            self.count = 0

        def after_step(self, state):
            self.count += 1

        def figures(self):
            return {"count": self.count}

        def restore(self, figures):
            self.count = figures["count"]

    rows = [{"instruction": f"Add 1 to {number}.", "input": "", "output": str(number + 1)} for number in range(16)]
    settings = {"student.factorize.rank": 16, "train.save_every": 2, "scoring.models": []}
    run = {"method": "sft", "steps": 2, "global_batch_size": 4, "output_dir": folder / "run"}
    llmdistill.distill("embedded:teacher", None, rows, settings=settings, callbacks=[Steps], **run)
    (manifest,) = (folder / "run/checkpoints").glob("step-2/*.json")
    assert json.loads(manifest.read_text(encoding="utf-8"))["figures"]["0.Steps"] == {"count": 2}


def test_an_architecture_of_ones_own_is_tapped_right():
    names = run_block("An architecture")
    model, student = (names[name].eval() for name in ("teacher", "student"))
    ids = torch.arange(2, 26).view(2, 12)
    stock = model(ids, output_hidden_states=True)
    aspects = ("query", "key", "value", "ffn_up", "ffn_gate", "ffn_down", "hidden")
    recorder = Recorder(model, dict.fromkeys(aspects, frozenset({0, 1})))
    with recorder.recording():
        assert torch.equal(model(ids).logits, stock.logits)
    taps = recorder.pop_taps()
    recorder.remove()

    assert torch.equal(taps.hidden[0], stock.hidden_states[1])
    model.set_attn_implementation("eager")
    attentions = model(ids, output_attentions=True).attentions
    for layer, (mlp, attention) in enumerate((each.mlp, each.self_attn) for each in model.model.layers):
        scores = taps.query[layer] @ taps.key[layer].transpose(-1, -2) * taps.scaling[layer]
        seen = torch.ones(12, 12, dtype=torch.bool).tril()
        assert torch.allclose(scores.masked_fill(~seen, -torch.inf).softmax(-1), attentions[layer], atol=1e-6)
        inner = torch.nn.functional.silu(taps.ffn_gate[layer]) * taps.ffn_up[layer]
        assert torch.allclose(mlp.down_proj(inner), taps.ffn_down[layer], atol=1e-6)
        values = attention.v_proj(stock.hidden_states[layer])
        assert torch.allclose(values, taps.value[layer].transpose(1, 2).flatten(2), atol=1e-6)
    assert 0 < student.num_parameters() < model.num_parameters()
    assert student(ids).logits.shape == stock.logits.shape


def test_a_form_of_ones_own_is_planned_saved_scored_and_exported(folder, capfd):
    names = run_block("A form of the student")
    result, printed = names["result"], capfd.readouterr().out
    assert "25% of the weights pruned" in printed
    pruned = 0
    halved = load_model(folder / "halved", dtype="auto")
    words = ["export", "--to", "pruned", "--settings.share", "0.5", "--model", str(result.folder / "student")]
    assert main([*words, "--output", str(folder / "halved again")]) == 0
    again = load_model(folder / "halved again", dtype="auto")
    for student, share in ((result.student, 4), (halved, 2), (again, 2)):
        linears = [m for m in student.modules() if type(m) is torch.nn.Linear and m is not student.lm_head]
        assert len(linears) > 10
        for module in linears:
            zeros = (module.weight == 0).sum(dim=1)
            assert torch.equal(zeros, torch.full_like(zeros, module.weight.shape[1] // share))
            pruned += int(zeros.sum()) if share == 4 else 0
    metrics = result.metrics
    assert metrics["untrained"]["params"] - metrics["student"]["params"] == pruned > 0

    words = ["--ds_config", "zero2", "--student.factorize.rank", "16"]
    config, _ = parse_run([*words, "--student.forms.pruned.share", "0.25"], METHODS)
    sizes = make_plan(config).models.sizes
    assert sizes["student_params"] - sizes["saved_params"] == pruned
    assert sizes["saved_bytes"] == sizes["student_params"] * make_plan(config).models.dtype.itemsize
    for given, said in (
        ({"prunned": {}}, r"student\.forms\.prunned: no form of this name .*did you mean pruned"),
        ({"pruned": {"shares": 0.5}}, r"student\.forms\.pruned\.shares: there is no such setting.*share"),
        ({"pruned": 0.5}, r"student\.forms\.pruned is 0\.5: give its settings"),
    ):
        with pytest.raises(UserError, match=said):
            chosen_forms(StudentConfig(forms=given))


def test_a_student_has_one_form_that_is_saved(monkeypatch):
    """Its loader reads the tensors of one form."""
    forms = {name: type(name, (StudentForm,), {"key": key})() for name, key in (("a", "a"), ("b", "b"), ("c", None))}
    monkeypatch.setattr("llmdistill.models.forms.FORMS", {**FORMS, **forms})
    quantized = QuantizeConfig(weights="int8")
    for student, said in (
        (StudentConfig(forms={"b": {}, "a": {}}), r"student\.forms\.a and student\.forms\.b each change"),
        (StudentConfig(quantize=quantized, forms={"a": {}}), r"student\.quantize and student\.forms\.a each change"),
    ):
        with pytest.raises(UserError, match=said):
            chosen_forms(student)
    chosen = chosen_forms(StudentConfig(quantize=quantized, forms={"c": {}}))
    assert [form for form, _ in chosen] == [FORMS["quantize"], forms["c"]]


def test_a_task_of_ones_own_is_an_ordinary_run(script, folder):
    script("A task")
    metrics = json.loads((folder / "runs/parity/metrics.json").read_text(encoding="utf-8"))
    lines = (folder / "runs/parity/predictions/student/dev.tsv").read_text(encoding="utf-8").splitlines()
    rows = [line.split("\t") for line in lines[1:]]
    # The 231st sum and those after it, by hand.
    assert [int(row[2]) for row in rows] == [(n % 7 + n % 11) % 2 for n in range(231, 308)]
    right = sum(row[1] == row[2] for row in rows)
    assert metrics["student"]["dev"]["Parity"]["accuracy"] == pytest.approx(100 * right / len(rows))
    assert metrics["student"]["score"] == metrics["student"]["dev"]["Parity"]["accuracy"]
    assert (folder / "runs/parity/student/config.json").is_file()


def test_a_package_makes_its_methods_divergences_tasks_teachers_and_forms_known_by_entry_points(folder):
    """In each process, also those that a comparison starts; the package's own names keep their meaning."""
    (folder / "mine.py").write_text(
        (folder / "mine.py").read_text(encoding="utf-8") + "\n\nLAST = METHODS.pop('last')\n"
    )
    info = folder / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[llmdistill.methods]\nlast = mine:LAST\nkd = mine:LAST\nlost = nowhere:X\n"
        "[llmdistill.divergences]\nhellinger = hellinger:HELLINGER\njsd = hellinger:HELLINGER\n"
        "[llmdistill.teachers]\nwise = wise:WISE\nserver = wise:WISE\n"
        "[llmdistill.forms]\npruned = pruned:PRUNED\nlora = pruned:PRUNED\n"
        "[llmdistill.tasks]\nparity = parity:Parity\nRTE = parity:Parity\n"
    )
    code = (
        "from llmdistill.methods import METHODS\nfrom llmdistill.tasks import TASKS, is_task\n"
        "print(METHODS['last'].label, METHODS['kd'].settings.__name__, 'lost' in METHODS)\n"
        "from llmdistill.losses import DIVERGENCES\nprint(DIVERGENCES['hellinger'].formula, DIVERGENCES['jsd'].label)\n"
        "print(TASKS['parity'], is_task('PARITY'), TASKS['rte'])\n"
        "from llmdistill.config import TeacherConfig\nfrom llmdistill.teachers.choice import TEACHERS, source_of\n"
        "print([*TEACHERS], type(source_of(TeacherConfig(source='wise'))).__name__)\n"
        "from llmdistill.models.forms import FORMS, exported_forms\n"
        "print({name: type(form).__name__ for name, form in FORMS.items()}, [*exported_forms()])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, cwd=folder
    )
    assert run.stdout.splitlines() == [
        "last layer KdConfig False",
        "1 - Σ √(p q) JSD",
        "parity:Parity True llmdistill.tasks.glue:Glue",
        "['wise'] WiseSource",
        "{'lora': 'Adapters', 'quantize': 'FewBits', 'pruned': 'Pruned'} ['int8', 'int4', 'pruned']",
    ]
    assert "kd is a name of llmdistill's own" in run.stderr
    assert "jsd is a name of llmdistill's own" in run.stderr
    assert "server is a name of llmdistill's own" in run.stderr
    assert "nowhere:X of llmdistill.methods is left out: ModuleNotFoundError" in run.stderr
