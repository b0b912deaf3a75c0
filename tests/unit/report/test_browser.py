"""The page of a comparison in a browser: nothing is cut, on a telephone and on a desk, light and dark."""

import html
import json
import re
import shutil
import subprocess

import pytest

from llmdistill.report.comparison import comparison_report
from llmdistill.report.pages import render
from llmdistill.report.results import TABLE_SIZE, Comparison, ComparisonRow, UntrainedStudent
from llmdistill.report.samples import Sample
from llmdistill.report.tables import TitledTable
from llmdistill.report.trials import TrialRow, entry_of
from llmdistill.report.weights_on_disk import Checkpoint

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)
SETS = ["dolly", "self_instruct", "vicuna", "super_natural_instructions", "unnatural"]
METHODS = {"sft": "SFT", "kd": "KD", "makd_minilm": "MaKD + MiniLM", "skew_reverse_kl": "Skewed reverse KL"}
TERMS = ["logits", "values", "queries"]

MEASURE = """
function contrast(color, paper) {
  const light = text => {
    const [r, g, b] = text.match(/[\\d.]+/g).slice(0, 3)
      .map(x => x / 255).map(x => x <= .03928 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const [low, high] = [light(color), light(paper)].sort((a, b) => a - b);
  return (high + .05) / (low + .05);
}
function measure(frame) {
  const page = frame.contentDocument, view = frame.contentWindow, found = [];
  page.querySelectorAll("details").forEach(each => each.open = true);
  const say = (what, element) => found.push(`${what}: <${element.tagName}> ${element.textContent.trim().slice(0, 40)}`);
  for (const element of page.querySelectorAll("html, body, body *:not(style)")) {
    const box = element.getBoundingClientRect(), svg = element.ownerSVGElement;
    if (!box.width) continue;
    if (box.left < -1 || box.right > page.documentElement.clientWidth + 1) say("beyond the page", element);
    if (!svg && element.scrollWidth > element.clientWidth + 1 && element.clientWidth) say("behind a scroll", element);
    if (element.tagName !== "text") continue;
    const around = svg.getBoundingClientRect(), scale = around.width / svg.viewBox.baseVal.width;
    const style = view.getComputedStyle(element);
    if (box.left < around.left - 2 || box.right > around.right + 2) say("beyond its figure", element);
    if (parseFloat(style.fontSize) * scale < 7.5) say("too small", element);
    const paper = view.getComputedStyle(page.body).backgroundColor;
    const onField = ["rgb(253, 253, 253)", "rgb(16, 16, 16)"].includes(style.fill);  // a rank, on its own color
    if (!onField && contrast(style.fill, paper) < 4.5) say("hard to see", element);
  }
  for (const figure of page.querySelectorAll("svg")) {
    const texts = [...figure.querySelectorAll("text")].map(text => [text, text.getBoundingClientRect()]);
    texts.forEach(([text, a], index) => texts.slice(index + 1).forEach(([other, b]) => {
      const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (wide > 2 && high > 3) say(`upon ${other.textContent.trim()}`, text);
    }));
  }
  return {found, dark: view.matchMedia("(prefers-color-scheme: dark)").matches, width: view.innerWidth,
          tables: [...page.querySelectorAll("table")].map(each => {
            const {left, top} = each.getBoundingClientRect();
            return {left, top, display: view.getComputedStyle(each).display};
          }),
          figures: page.querySelectorAll("svg").length, cells: page.querySelectorAll("td").length};
}
onload = () => {
  const measured = [...document.querySelectorAll("iframe")].map(measure);
  document.getElementById("measured").textContent = JSON.stringify(measured);
};
"""


def make_row(name, label, start="", params=1_234_567_890):
    is_method, level = name in METHODS, 60.0 if name == "teacher" else 30.0
    losses = ("loss", "valid_loss", *TERMS)
    about = {
        "row": name,
        "title": name,
        "command": "llmdistill train --recipe quickstart " + "--train.learning_rate 0.001 " * 4,
        "settings": {"train.learning_rate": 0.001, "makd.logits": 10.0},
        "tokens": 123_456_789,
        "tokens_per_second": 123_456.0,
        "peak_memory_bytes": 2**36,
        "seconds": 123_456.0,
    }
    log = [{"step": 250 * n, **dict.fromkeys(losses, 9.0 / n)} for n in range(1, 9)] if is_method else []
    model = {"teacher": "teacher", "none": "untrained"}.get(name, "student")
    runs = []
    for seed in range(3 if is_method else 1):
        scores = {(of, "rougeL"): level + seed + number for number, of in enumerate(SETS)}
        scores |= {("valid", "rougeL"): level, **{(of, "reference_perplexity"): 1234.5 for of in SETS}}
        entry = entry_of(scores, generation_tokens_per_second=123_456.0)
        runs.append(TrialRow(seed=seed, folder=f"cells/{name}-{seed}", models={model: entry}, **about))
    return ComparisonRow(
        name=name,
        label=label,
        start=start,
        params=params,
        runs=runs,
        logs={run.folder: log for run in runs},
        trials=runs[:1] if is_method else (),
        terms=TERMS if name == "kd" and start == "loss" else (),
        checkpoint=Checkpoint(size=2**31, formats={"BF16": 10**9}, parts={"embeddings and head": 2**30}),
        calibration={"calibration_tokens": 1_234_567, "calibration_seconds": 12_345.0} if start else None,
    )


def make_comparison():
    models = {"none": "untrained student", **METHODS}
    students, small = (
        [make_row(name, label, start, params) for start in ("activations", "loss") for name, label in models.items()]
        for params in (1_234_567_890, 700_000_000)
    )
    names = [f"layers.{layer}.{kind}" for layer in range(12) for kind in ("self_attn.q_proj", "mlp.down_proj")]
    weighting = {
        "weighting": "gradients",
        "ranks": {name: 100 + number for number, name in enumerate(names)},
        "spectra": {name: {"shape": [512, 512], "costs": [[0, 2.0], [99, 1.0], [128, 0.5]]} for name in names},
        "predicted_loss": 0.1234,
        "held_out": {"loss": 0.1234, "uniform": 0.2345},
    }
    about = {"size": TABLE_SIZE, "folder": "cells/base", "params": 1_234_567_890, "average": 4.5}
    about |= {"label": "weighted by gradients, ranks by predicted loss"}
    return Comparison(
        title="Methods under equal conditions: an_unusually_long_name_of_a_folder_without_any_space",
        sets=SETS,
        examples={name: (200, 1000 + number) for number, name in enumerate(SETS)},
        rows=[make_row("teacher", "teacher"), *students],
        sizes=[*students, *small],
        untrained=[
            UntrainedStudent(start="activations", **about),
            UntrainedStudent(start="loss", weighting=weighting, **about),
        ],
        samples=[Sample(set=SETS[0], prompt="Who? " * 40, reference="x" * 300, answers={"teacher": "A cat"})],
        warnings=["the teacher in /a/long/path/without/a/space" + "/deeper" * 20],
        facts={"Command": "llmdistill compare --suite makd-table5 " * 5},
        paper={"kd-loss": dict.fromkeys(SETS, 25.1)},
    )


def measure(folder, text, *, dark):
    """Return what a browser measures of a page of 390 and of 1280 pixels."""
    frames = "".join(
        f'<iframe srcdoc="{html.escape(text, quote=True)}" style="width:{width}px;height:900px;border:0"></iframe>'
        for width in (390, 1280)
    )
    file = folder / "harness.html"
    file.write_text(
        f'<!DOCTYPE html><meta charset="utf-8">{frames}<pre id="measured"></pre><script>{MEASURE}</script>',
        encoding="utf-8",
    )
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    run = subprocess.run(
        [*command, scheme, "--dump-dom", file.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    found = re.search(r'<pre id="measured">(.+?)</pre>', run.stdout, re.DOTALL)
    assert found is not None, run.stderr
    return json.loads(html.unescape(found.group(1)))


@pytest.mark.skipif(not CHROMIUM, reason="no Chromium is installed, in which the page could be measured")
def test_no_figure_or_column_is_cut(tmp_path):
    comparison_report(tmp_path, make_comparison()).write()
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    for dark in (False, True):
        for measured, width in zip(measure(tmp_path, page, dark=dark), (390, 1280), strict=True):
            assert (measured["width"], measured["dark"]) == (width, dark)
            assert measured["figures"] == 7
            assert measured["cells"] > 100
            assert measured["found"] == [], f"at {width} pixels"


@pytest.mark.skipif(not CHROMIUM, reason="no Chromium is installed, in which the page could be measured")
def test_the_tables_of_a_run_stand_side_by_side_where_both_fit(tmp_path):
    header = ["model", "params", "size", "seen", "unseen", "skills", "perplexity", "train tok/s", "gen tok/s"]
    table = TitledTable("Scores", header, [["teacher", "1,220,224", "100%", *["97.8"] * 6]] * 3)
    small = TitledTable("Distance", ["model", "nats per token", "perplexity"], [["trained", "0.00779", "1.04"]])
    record = {"command": "c", "hardware": "h", "versions": {}, "finished": "f"}
    page = {"title": "t", "verdict": "v", "bars": {}, "drawings": [], "has_answers": False, "kept": None}
    page |= {
        "labels": {"student": "trained"},
        "warnings": [],
        "record": record,
        "legend": "What the figures mean. " * 20,
    }
    text = render("run.html.j2", **page, table=table, distance=(small, "Held-out rows."), samples=[])
    narrow, wide = measure(tmp_path, text, dark=False)
    assert narrow["found"] == wide["found"] == []
    scores, distance = wide["tables"]
    assert scores["top"] == distance["top"]
    assert scores["left"] < distance["left"]
    scores, distance = narrow["tables"]
    assert scores["left"] == distance["left"]
    assert (scores["display"], distance["display"]) == ("block", "table"), "three columns need no cards"
