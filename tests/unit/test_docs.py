"""README.md and docs/: the parsers take their commands, and their links lead somewhere.

That their Python runs is in test_doc_examples.py.

The bash blocks of a page run in a real shell, so that variables, loops and quotes mean what they mean to a reader. The
programs in it are stubs that only write down their arguments, which are then given to the real parsers in this process.
"""

import argparse
import ast
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from importlib import import_module
from pathlib import Path

import jsonargparse
import pytest
from pages import FENCE, PAGES, ROOT, blocks
from transformers import GPT2Config

from llmdistill import cli
from llmdistill.commands import cache as cache_command
from llmdistill.commands import compare
from llmdistill.commands.published_table import configs_of
from llmdistill.commands.side_by_side import SUITES
from llmdistill.config.command_line import build, parse_own, parse_run, recipe_names, run_parser
from llmdistill.losses import DIVERGENCES
from llmdistill.methods import METHODS
from llmdistill.papers.table_study import rows_to_run
from llmdistill.report.paper import load_table, table_names
from llmdistill.runtime.ds_config import ds_config_path
from llmdistill.runtime.launch import LAUNCHER_FLAGS, LAUNCHER_SWITCHES, split_launcher_flags

LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)\)")
PROGRAMS = ("deepspeed", "torchrun", "srun", "python", "llmdistill", "pip", "git")
STUB = '#!/bin/bash\nprintf "%s\\0" "{name}" "$@" >>"$CALLS"\nprintf "\\036" >>"$CALLS"\necho {name}-output\n'


def commands(page: Path, folder: Path) -> list[list[str]]:
    """What a shell starts for the bash blocks of a page, one after the other, as lists of arguments."""
    for name in PROGRAMS:
        stub(folder / "bin" / name, name)
    for script in (ROOT / "scripts").rglob("*.sh"):
        stub(folder / script.relative_to(ROOT), str(script.relative_to(ROOT)))
    calls = folder / "calls"
    calls.touch()
    source = "set -eu\n" + "\n".join(blocks(page, "bash"))
    environment = {"PATH": str(folder / "bin"), "CALLS": str(calls)}
    shell = subprocess.run(["/bin/bash", "-c", source], cwd=folder, env=environment, capture_output=True, text=True)
    assert shell.returncode == 0, f"{page.name}: {shell.stderr}"
    written = calls.read_text(encoding="utf-8")
    return [call.split("\0")[:-1] for call in written.split("\036") if call]


def stub(file: Path, name: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(STUB.format(name=name))
    file.chmod(0o755)


class Parsed(BaseException):
    """The parser took the arguments, or has all its options; what the command does is another test's."""


@contextmanager
def parsing_only() -> Iterator[None]:
    """Within it a command ends with Parsed when its parser has taken the arguments."""

    def stop_after(original: Callable[..., object]) -> Callable[..., object]:
        def parse_args(self: object, *arguments: object, **keywords: object) -> object:
            original(self, *arguments, **keywords)
            raise Parsed

        return parse_args

    with pytest.MonkeyPatch.context() as patch:
        for kind in (jsonargparse.ArgumentParser, argparse.ArgumentParser):
            patch.setattr(kind, "parse_args", stop_after(kind.parse_args))
        yield


def check_train(arguments: Sequence[str]) -> None:
    config, _ = parse_run(arguments, METHODS)
    assert ds_config_path(config.ds_config).is_file()


def check_compare(arguments: Sequence[str]) -> None:
    parsed, rest = parse_own(compare.build_parser(), arguments)
    settings = build(parsed, compare.CompareConfig)
    if settings.suite in table_names():
        table = load_table(settings.suite)
        rows = rows_to_run(table, None if settings.rows is None else settings.rows.split(","))
        assert configs_of(table, rows, rest)[0].keys() == rows.keys()
        return
    assert compare.choose_methods(settings, "instructions").variants
    check_train(rest)


def check_cache(arguments: Sequence[str]) -> None:
    parsed, rest = parse_own(cache_command.build_parser(), arguments)
    assert parsed.output.name
    check_train(rest)


def check_script(script: str, arguments: Sequence[str]) -> None:
    """A script of the checkout: the main job, a benchmark, a bench, or an example."""
    assert (ROOT / script).is_file(), script
    if script == "llmdistill/train.py":
        return check_train(arguments)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str((ROOT / script).parent))
        patch.setattr(sys, "argv", [script, *arguments])
        if script.startswith(("eval/", "scripts/examples/")):
            run = partial(runpy.run_path, str(ROOT / script), run_name="__main__")
        else:
            run = import_module(Path(script).stem).main
        with parsing_only(), pytest.raises(Parsed):
            run()


def check_llmdistill(name: str, arguments: Sequence[str]) -> None:
    """A command of `llmdistill`; the launcher's flags are not its own."""
    assert name in cli.COMMANDS, name
    _, rest = split_launcher_flags(arguments)
    if name == "train":
        return check_train(rest)
    if name == "compare":
        return check_compare(rest)
    if name == "cache":
        return check_cache(rest)
    with parsing_only(), pytest.raises(Parsed):
        cli.main([name, *rest])


@cache
def check(*command: str) -> None:
    """A command of a page, if a parser is to judge it; the same one on several pages only once."""
    program, *rest = command
    shown_help = pytest.raises(SystemExit) if "--help" in rest else nullcontext()
    if program == "python" and rest[0] == "-c":
        ast.parse(rest[1])
    elif program in ("python", "deepspeed", "torchrun", "srun"):
        at = next(index for index, word in enumerate(rest) if word.endswith(".py"))
        if program in ("python", "deepspeed"):
            flags, others = split_launcher_flags(rest[:at])
            assert not others, f"{others}: no flags of the launcher"
            assert not flags or program == "deepspeed"
        with shown_help:
            check_script(rest[at], rest[at + 1 :])
    elif program == "llmdistill":
        with shown_help:
            check_llmdistill(rest[0], rest[1:])


@pytest.fixture
def named_files(tmp_path, monkeypatch):
    """Work where the files stand that the pages name: DIR is a model, mine.yaml a recipe on a page."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds_configs").symlink_to(ROOT / "ds_configs")
    GPT2Config().save_pretrained(tmp_path / "DIR")
    recipe = next(text for text in blocks(ROOT / "docs/train.md", "yaml") if text.startswith("# mine.yaml\n"))
    (tmp_path / "mine.yaml").write_text(recipe, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.slow] if page.name.startswith("results-") else []) for page in PAGES],
    ids=lambda page: page.name,
)
def test_every_command_of_a_page_is_one_that_the_parsers_take(page, named_files, tmp_path_factory):
    for command in commands(page, tmp_path_factory.mktemp("shell")):
        try:
            check(*command)
        except (Exception, SystemExit, pytest.fail.Exception) as error:
            raise AssertionError(f"{page.name}: {' '.join(command)}: {error}") from error


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_a_page_lead_somewhere(page):
    for link in LINK.finditer(FENCE.sub("", page.read_text(encoding="utf-8"))):
        file, _, anchor = link["target"].partition("#")
        if file.startswith(("http://", "https://")):
            continue
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{page.name}: {link['target']}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link['target']}"


def test_readme_leads_to_every_page():
    named = {link["target"].split("#")[0] for link in LINK.finditer((ROOT / "README.md").read_text(encoding="utf-8"))}
    assert {os.path.relpath(page, ROOT) for page in PAGES[1:]} <= named


def test_pages_name_every_method_and_recipe():
    methods = (ROOT / "docs/methods.md").read_text(encoding="utf-8")
    assert [name for name in METHODS if f"`{name}`" not in methods] == []
    for name, entry in DIVERGENCES.items():
        assert f"`{name}`" in methods or f"--kd.divergence {name}" in methods or name == "forward_kl"
        if entry.preset is not None:
            assert f"| `{entry.preset}` | {entry.formula} | `--method kd --kd.divergence {name}" in methods
    recipes = (ROOT / "docs/recipes.md").read_text(encoding="utf-8")
    plain = [name for name in recipe_names() if "/" not in name]
    assert [name for name in plain if f"`{name}`" not in recipes] == []


def test_settings_that_pages_name_exist():
    parser = run_parser(METHODS)
    known = {option.removeprefix("--") for action in parser._actions for option in action.option_strings}
    sections = "|".join({key.split(".")[0] for key in known if "." in key})
    # The changes name settings that are gone too.
    for page in set(PAGES) - {ROOT / "CHANGELOG.md"}:
        text = FENCE.sub("", page.read_text(encoding="utf-8"))
        named = re.findall(rf"`(?:--)?((?:{sections})\.[a-z_.]*[a-z_])", text)
        unknown = {key for key in named if key not in known and not key.endswith((".py", ".md"))}
        assert not unknown, f"{page.name}: {sorted(unknown)}"


def options_of_commands() -> set[str]:
    """The flags of all commands, of the suites and of the launcher."""
    options = {f"--{name}" for name in (*LAUNCHER_FLAGS, *LAUNCHER_SWITCHES)}

    def parse_args(self: argparse.ArgumentParser, *arguments: object, **keywords: object) -> object:
        options.update(option for action in self._actions for option in action.option_strings)
        raise Parsed

    with pytest.MonkeyPatch.context() as patch:
        for kind in (jsonargparse.ArgumentParser, argparse.ArgumentParser):
            patch.setattr(kind, "parse_args", parse_args)
        for command in [
            *([name] for name in cli.COMMANDS),
            *(["evaluate", "--suite", name] for name in (*SUITES, "glue")),
        ]:
            with pytest.raises(Parsed):
                cli.main(command)
    return options


def test_flags_that_pages_name_exist():
    """Those of other programs have hyphens, or follow the program's name."""
    known = options_of_commands()
    for file in [*ROOT.glob("scripts/**/*.py"), *ROOT.glob("eval/*.py"), *ROOT.glob("scripts/**/*.sh")]:
        known |= set(re.findall(r"--[a-z_]+", file.read_text(encoding="utf-8")))
    unknown = []
    # The changes name flags that are gone too.
    for page in set(PAGES) - {ROOT / "CHANGELOG.md"}:
        for code in re.findall(r"`([^`]+)`", FENCE.sub("", page.read_text(encoding="utf-8"))):
            if not code.startswith(("tensorboard ", "wandb ", "llama-gguf-split ", "srun ", "#SBATCH ", "pip ")):
                flags = re.findall(r"(?<!\S)--[a-z_]+[\w.-]*", code)
                unknown += [(page.name, flag) for flag in flags if "-" not in flag[2:] and flag not in known]
    assert [(page, flag) for page, flag in unknown if flag != "--student.forms.NAME.SETTING"] == []


NO_COMMAND = ("architecture.md", "index.md", "security.md")
"""Pages that begin with a sentence: no single command answers them."""


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_a_page_begins_with_the_command_that_answers_it(page):
    lines = [line for line in page.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    assert lines[0].startswith("```") or page.name in NO_COMMAND
