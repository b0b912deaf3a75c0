"""The second stage of a run, on the tiny tasks of this folder and with an engine without DeepSpeed."""

import json
import shutil

import pytest
from glue_tasks import write_task
from question_files import write_tasks
from safetensors.torch import load_file, save_file

from llmdistill.artifacts import write_manifest
from llmdistill.config import FactorizeConfig, StudentConfig
from llmdistill.config.command_line import parse_run, to_dict
from llmdistill.fingerprints import fingerprint
from llmdistill.methods import METHODS
from llmdistill.papers.two_stages import collect_stages, plan_tasks
from llmdistill.report.trials import read_trials
from llmdistill.students.convert import compress_folder
from llmdistill.train import main
from llmdistill.training.plan import make_plans
from llmdistill.training.run_folder import shaping_settings

pytestmark = pytest.mark.usefixtures("cpu_world")
SHARED = "protocol: custom, learning_rates: [1.0e-2], epochs: [1], batch_size: 16, max_length: 24"
EVERY_ROW = "names: [rte], rows: [two_stages, no_pretraining, no_kd], tsne: true"


@pytest.fixture(scope="module")
def write(encoder, data):
    """Write a recipe with a second stage; gives the command line of its run."""

    def make(folder, tasks, *more):
        recipe, text = folder / "recipe.yaml", folder / "text.txt"
        text.write_text("A text of which w1 w2 w3 are read.\n")
        recipe.write_text(
            f"{{teacher: {{model: {encoder}}}, student: {{factorize: {{rank: 6}}}}, method: kroneckerbert,\n"
            f"data: {{kind: text, train: {text}, max_length: 32}}, train: {{dtype: fp32}},\n"
            f"tasks: {{data_dir: {data}, {SHARED}, {tasks}}}}}\n"
        )
        return ["--recipe", str(recipe), "--ds_config", "zero2", "--output_dir", str(folder / "run"), *more]

    return make


@pytest.fixture
def arguments(write, tmp_path):
    return lambda tasks="names: [rte]", *more: write(tmp_path, tasks, *more)


def read(file):
    return json.loads(file.read_text())


def second_stage(arguments: list[str]) -> None:
    plan = plan_tasks(make_plans(parse_run(arguments, METHODS)[0]))
    plan.check_data()
    plan.conduct()


@pytest.fixture(scope="module")
def first_stage(encoder, tmp_path_factory):
    run = tmp_path_factory.mktemp("first stage") / "run"
    compress_folder(encoder, run / "untrained", StudentConfig(factorize=FactorizeConfig(rank=6)))
    shutil.copytree(run / "untrained", run / "student")
    weights = load_file(run / "student/model.safetensors")
    weights["bert.embeddings.position_embeddings.weight"] += 0.01
    save_file(weights, run / "student/model.safetensors", metadata={"format": "pt"})
    write_manifest(run / "student")
    return run


@pytest.fixture(scope="module")
def done(in_process, write, first_stage):
    """The folder of the second stage with every row."""
    second_stage(write(first_stage.parent, EVERY_ROW))
    return first_stage / "tasks"


def dry_run(capsys, arguments):
    assert main([*arguments, "--dry_run", "--json"]) == 0
    return json.loads(capsys.readouterr().out).get("tasks")


def test_a_dry_run_says_what_will_follow(arguments, capsys, tmp_path) -> None:
    tasks = "names: [rte, sts-b], rows: [two_stages, no_kd], seeds: [1, 2], settings: {kroneckerbert: {ffn: 0.5}}"
    said = dry_run(capsys, arguments(tasks))
    assert said["names"] == ["RTE", "STS-B"]
    assert list(said["rows"]) == ["teacher", "two_stages", "no_kd"]
    assert [row["runs"] for row in said["rows"].values()] == [4, 4, 4]
    terms = said["rows"]["two_stages"]["terms"]
    assert (terms["ffn"], terms["embedding"], terms["sequence_label"]) == (0.5, 1.0, 1.0)
    assert list(said["rows"]["no_kd"]["terms"]) == ["sequence_label"]
    assert said["rows"]["no_kd"]["teacher"] is None
    assert said["copy_classifier"] is True
    assert dry_run(capsys, arguments("names: []")) is None
    alone = dry_run(capsys, arguments("names: [rte], rows: [no_kd]"))
    assert list(alone["rows"]) == ["no_kd"], "labels need no teacher"
    tasks = "names: [rte], method: kd, also: [minilmv2], settings: {minilmv2: {relation_heads: 4}}"
    said = dry_run(capsys, arguments(tasks))
    relations = {"relation_qq", "relation_kk", "relation_vv"}
    assert set(said["rows"]["two_stages"]["terms"]) == {"sequence_forward_kl", "sequence_label", *relations}
    assert said["copy_classifier"] is False
    asked = arguments("names: [squad2]", "--tasks.data_dir", str(write_tasks(tmp_path / "questions", train=20, dev=6)))
    assert {"ffn", "sequence_logits", "sequence_label"} <= dry_run(capsys, asked)["rows"]["two_stages"]["terms"].keys()
    assert not (tmp_path / "run").exists()


def test_the_rows_of_the_table_are_their_runs(done, first_stage) -> None:
    table = read(done / "report.json")
    assert list(table["rows"]) == ["teacher", "no_kd", "no_pretraining", "two_stages"]
    for row, shown in table["rows"].items():
        results = read(done / row / "results.json")
        assert shown["dev"] == results["tasks"]["RTE"]["dev"]
        assert shown["params"] == results["params"]["model"]["total"]
        assert shown["average"] == pytest.approx(results["averages"]["model"]["plain"])
    assert table["rows"]["teacher"]["params"] > table["rows"]["two_stages"]["params"]
    taught = fingerprint(str(done / "teacher/RTE/best"))
    models = {"two_stages": "student", "no_pretraining": "untrained", "no_kd": "student"}
    for row, model in models.items():
        record = read(done / row / "RTE/lr-0.01-epochs-1-seed-1/run.json")
        assert record["inputs"]["student.model"] == fingerprint(str(first_stage / model))
        assert record["inputs"].get("teacher.model") == (None if row == "no_kd" else taught)
        assert record["config"]["method"] == ("sft" if row == "no_kd" else "kroneckerbert")
    for row in read_trials(done):
        student = row.models["student"].by_set("accuracy")
        assert student == {"RTE": table["rows"][row.row]["dev"]["RTE"]["accuracy"]["mean"]}
    tuned = [row for row in read_trials(done / "two_stages/RTE") if row.chosen and row.row == "student"]
    assert [row.seed for row in tuned] == read(done / "two_stages/results.json")["tasks"]["RTE"]["seeds"]
    scores = [row["dev"]["RTE"]["accuracy"]["mean"] for row in table["rows"].values()]
    report = (done / "report.md").read_text()
    assert all(f"| {score:.1f} |" in report for score in scores)
    assert "| both stages | distilled | distilled |" in report
    assert "![t-SNE of RTE](tsne/RTE.png)" in report
    assert (done / "tsne/RTE.png").is_file()
    figure = read(done / "tsne/RTE.json")["models"]
    assert list(figure) == ["teacher", "no KD in stage 2", "no stage 1", "both stages"]
    assert figure["both stages"]["path"] == str(done / "two_stages/RTE/best")
    # Every metric that a task shows has a column.
    results = read(done / "two_stages/results.json")
    results["tasks"]["RTE"] |= {"shown": ["em", "f1"], "dev": {"RTE": {"em": 1.0, "f1": 2.0}}}
    assert [each["metric"] for each in collect_stages({"two_stages": results}, {}, run="r")["columns"]] == ["em", "f1"]


def test_what_is_finished_is_not_run_again_nor_under_other_settings(write, done, first_stage, engine) -> None:
    with pytest.raises(ValueError, match=r"train\.weight_decay was 0\.01 and is now 0\.5; choose another output_dir"):
        second_stage(write(first_stage.parent, "names: [rte], rows: [no_kd], weight_decay: 0.5"))
    before = read(done / "report.json")["rows"]
    for name in ("metrics.json", "metrics.jsonl"):
        (done / "two_stages/RTE/lr-0.01-epochs-1-seed-1" / name).unlink()
    second_stage(write(first_stage.parent, EVERY_ROW))
    assert engine.built == 1
    assert read(done / "report.json")["rows"] == before


def test_teachers_that_are_given_are_not_fine_tuned(arguments, done, first_stage, engine, tmp_path) -> None:
    given, copied = tmp_path / "teachers", tmp_path / "run"
    shutil.copytree(done / "teacher", given)
    shutil.copytree(first_stage, copied, ignore=shutil.ignore_patterns("tasks"))
    second_stage(arguments(f"names: [rte], rows: [two_stages], teacher: {given}"))
    assert engine.built == 1
    found, own = (read(folder / "report.json")["rows"] for folder in (copied / "tasks", done))
    for row in ("two_stages", "teacher"):
        assert found[row]["dev"]["RTE"] == own[row]["dev"]["RTE"]
    assert not (copied / "tasks/teacher").exists()
    assert "is the one that was given" in (copied / "tasks/report.md").read_text()


def test_mistakes_are_found_before_the_first_stage(capsys, arguments, encoder, make_encoder, tmp_path, monkeypatch):
    begin = "llmdistill.runtime.distributed.init_distributed"
    monkeypatch.setattr(begin, lambda *_: pytest.fail("the first stage has begun"))
    other = make_encoder(words=["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]", "no", "yes"])
    write_task(tmp_path / "glue", "RTE", {"train": 2, "dev": 1})
    long = f"index\tsentence1\tsentence2\tlabel\n0\t{'w1 ' * 40}\tw2\tentailment\n"
    (tmp_path / "glue/RTE/train.tsv").write_text(long, encoding="utf-8")
    long_examples = ["--tasks.data_dir", str(tmp_path / "glue"), "--tasks.max_length", "128"]
    for tasks, more, said in (
        ("rows: []", [], "tasks.rows is []: give one or more, each once, of two_stages"),
        (f"teacher: {encoder}", ["--tasks.names", "rte,cola"], "one model, but 2 tasks"),
        (f"teacher: {encoder}", ["--tasks.names", "mnli"], "tells 2 classes apart, but MNLI has 3"),
        (f"teacher: {other}", [], "its tokenizer is not that of"),
        ("settings: {kd: {ratio: 1.0}}", [], "tasks.settings.kd: that is no method of the second stage"),
        ("settings: {kroneckerbert: {lable: 1.0}}", [], "mean tasks.settings.kroneckerbert.label?"),
        ("rows: [two_stages]", ["--method", "none"], "method none trains no student"),
        ("rows: [two_stages]", ["--method", "sft"], "tasks.method: the run's method sft has no teacher"),
    ):
        assert main([*arguments(f"names: [rte], {tasks}"), *more]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert "Traceback" not in error
    monkeypatch.undo()  # the ranks are there when the examples are read
    assert main(arguments("names: [rte]", *long_examples)) == 2
    assert "has 44 tokens, but a model has positions for 32; give 32 or less" in capsys.readouterr().err


def test_tasks_may_be_named_when_the_first_stage_is_done(arguments) -> None:
    """They cannot change its student."""
    without, with_tasks = (to_dict(parse_run(arguments(tasks), METHODS)[0]) for tasks in ("names: []", "names: [rte]"))
    assert without != with_tasks
    assert shaping_settings(without) == shaping_settings(with_tasks)
