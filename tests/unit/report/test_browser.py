"""The page of a comparison in a browser: nothing is cut, on a telephone and on a desk, light and dark."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess

import pytest

from llmdistill.report.answers import Sample
from llmdistill.report.checkpoint import Checkpoint
from llmdistill.report.comparison import write_comparison
from llmdistill.report.results import TABLE_SIZE, Beginning, Comparison, Row, Run

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
          figures: page.querySelectorAll("svg").length, cells: page.querySelectorAll("td").length};
}
onload = () => {
  const measured = [...document.querySelectorAll("iframe")].map(measure);
  document.getElementById("measured").textContent = JSON.stringify(measured);
};
"""


def make_run(method, seed, level):
    history = [
        {"step": 250 * n, "loss": 9.0 / n, "valid_loss": 3.0 / n, **{term: 2.0 / n for term in TERMS}}
        for n in range(1, 9)
    ]
    return Run(
        method=method,
        seed=seed,
        folder=f"cells/{method}-{seed}",
        command="llmdistill train --recipe quickstart " + "--train.learning_rate 0.001 " * 4,
        settings={"train.learning_rate": 0.001, "makd.logits": 10.0},
        scores={name: level + seed + number for number, name in enumerate(SETS)},
        perplexity=dict.fromkeys(SETS, 1234.5),
        valid=level,
        costs={
            "training_tokens": 123_456_789,
            "training_tokens_per_second": 123_456.0,
            "generation_tokens_per_second": 12_345.0,
            "peak_memory_bytes": 2**36,
            "seconds": 372_500.0,
        },
        history=history if method not in ("teacher", "none") else (),
    )


def make_row(name, label, level, **more):
    runs = [make_run(name, seed, level) for seed in range(1 if name in ("teacher", "none") else 3)]
    held = Checkpoint(size=2**31, formats={"BF16": 10**9}, parts={"embeddings and head": 2**29, "factors": 2**30})
    terms = TERMS if name == "kd" and more["start"] == "loss" else []
    calibration = {"calibration_tokens": 1_234_567, "calibration_seconds": 12_345.0}
    return Row(
        name=name,
        label=label,
        runs=runs,
        terms=terms,
        **{"params": 1_234_567_890, "checkpoint": held, "calibration": calibration, **more},
    )


def make_comparison():
    students = [
        row
        for start in ("activations", "loss")
        for row in (
            make_row("none", "untrained student", 2.0, start=start),
            *(
                make_row(name, label, 30.0, start=start, trials=[make_run(name, 0, 25.0)])
                for name, label in METHODS.items()
            ),
        )
    ]
    teacher = make_row("teacher", "teacher", 60.0, calibration=None)
    names = [f"layers.{layer}.{kind}" for layer in range(12) for kind in ("self_attn.q_proj", "mlp.down_proj")]
    spectra = {name: {"shape": [512, 512], "costs": [[0, 2.0], [99, 1.0], [128, 0.5]]} for name in names}
    weighting = {
        "weighting": "gradients",
        "ranks": {name: 100 + number for number, name in enumerate(names)},
        "spectra": spectra,
        "predicted_loss": 0.1234,
        "held_out": {"loss": 0.1234, "uniform": 0.2345},
    }
    small = [make_row(row.name, row.label, 20.0, start=row.start, params=700_000_000) for row in students]
    return Comparison(
        title="Methods under equal conditions: an_unusually_long_name_of_a_folder_without_any_space",
        sets=SETS,
        examples={name: (200, 1000 + number) for number, name in enumerate(SETS)},
        rows=[teacher, *students],
        sizes=[*students, *small],
        beginnings=[
            Beginning(
                start=start,
                label="weighted by gradients, ranks by predicted loss",
                size=TABLE_SIZE,
                folder="cells/base",
                params=1_234_567_890,
                average=4.5,
                weighting=weighting if start == "loss" else {},
            )
            for start in ("activations", "loss")
        ],
        samples=[Sample(set=SETS[0], prompt="Who? " * 40, reference="x" * 300, answers={"teacher": "A cat"})],
        warnings=["the teacher in /a/long/path/without/a/space" + "/deeper" * 20],
        facts={"Command": "llmdistill compare --suite makd-table5 " * 5},
        paper={"kd-loss": dict.fromkeys(SETS, 25.1)},
    )


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    write_comparison(folder, make_comparison())
    return (folder / "report.html").read_text(encoding="utf-8")


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


pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no Chromium is installed, in which the page could be measured")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_no_figure_or_column_is_cut(tmp_path, page, dark):
    for measured, width in zip(measure(tmp_path, page, dark=dark), (390, 1280), strict=True):
        assert (measured["width"], measured["dark"]) == (width, dark)
        assert measured["figures"] == 7
        assert measured["cells"] > 100
        assert measured["found"] == [], f"at {width} pixels"


def test_what_is_cut_is_found(tmp_path):
    wide = '<body style="margin:0;background:#fff"><div style="overflow-x:auto"><p style="width:800px">wide</p></div>'
    texts = '<text x="690" y="20" fill="#eee" font-size="9">low</text><text x="690" y="22" font-size="9">on</text>'
    svg = f'<svg viewBox="0 0 700 50" width="350">{texts}</svg>'
    phone, desk = measure(tmp_path, wide + svg, dark=False)
    found = " ".join(phone["found"])
    for complaint in (
        "beyond the page: <P>",
        "behind a scroll: <DIV>",
        "beyond its figure",
        "too small",
        "hard to see",
        "upon on: <text>",
    ):
        assert complaint in found
    assert not any("<P>" in each or "<DIV>" in each for each in desk["found"])
