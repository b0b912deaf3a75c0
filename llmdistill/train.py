"""The main job: ``deepspeed llmdistill/train.py --ds_config ds_configs/zero2.json``.

The job creates a smaller student from a teacher, distills the teacher into the student, and reports the scores of both,
before and after training, in a table.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:
    # When this file runs as a script, sys.path[0] is this folder, and the repository is not on the path.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import gc
from collections.abc import Sequence
from typing import TYPE_CHECKING

from llmdistill.config import command_line
from llmdistill.config.help import COMBINATIONS, find_help_topic
from llmdistill.errors import UserError
from llmdistill.files import check_writable
from llmdistill.messages import print_result, set_level
from llmdistill.methods import METHODS
from llmdistill.runtime.launch import launched_ranks, launched_ranks_of_node, local_ranks, split_launcher_flags
from llmdistill.runtime.terminal import command_block

# All other modules are imported where they are used, so that --help and argument errors do not wait for torch, and a
# dry run does not wait for DeepSpeed or the libraries of the reports.
if TYPE_CHECKING:
    from llmdistill.config import RunConfig
    from llmdistill.training.plan import Plan


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    script, *typed = sys.argv
    with command_block() as ending:
        set_level()
        run(typed, script=script) if arguments is None else run(arguments)
    return ending.code


def run(arguments: Sequence[str], *, script: str | None = None) -> None:
    """Resolve and check the settings, then distill; a dry run only says what would run.

    Reports name the script that was started, None for `llmdistill train`.
    """
    launcher, words = split_launcher_flags(arguments)
    if find_help_topic(words) == COMBINATIONS:
        from llmdistill.training.rules import as_text

        return print_result(as_text())
    config, flags = command_line.parse_run(words, METHODS, script=script)
    if launcher and not flags.dry_run:
        typed = f"{' '.join(launcher)} {script or 'llmdistill/train.py'}"
        raise UserError(f"{launcher[0]} is the launcher's: give it to deepspeed ({typed}) or llmdistill train")
    plans = make_plans(config, local_ranks(launcher) if launcher else None)
    tasks = None
    if plans[-1].config.tasks.names:
        from llmdistill.papers.two_stages import plan_tasks

        tasks = plan_tasks(plans)
    if flags.dry_run:
        from llmdistill.planning.dry_run import show_plans

        if show_plans(config, plans, None if tasks is None else tasks.overview(), flags) != 0:
            raise SystemExit(1)
        return check_places(plans, thorough=False)  # what would run is told also where data are missing
    check_places(plans)
    if tasks is not None:
        tasks.check_tokens()

    from llmdistill.runtime.distributed import on_main, process_group
    from llmdistill.runtime.terminal import print_main, quiet_libraries
    from llmdistill.studies.distillation import run_chain
    from llmdistill.training.assemble import check_machine
    from llmdistill.training.cost import tell_before_writing
    from llmdistill.training.disk import check_disk
    from llmdistill.training.written_data import with_written_data, written_data_exist

    with process_group(command_line.typed_command(script, arguments)):
        quiet_libraries()
        print_main(command_line.about_recipe(flags))
        if on_main(lambda: not written_data_exist(config)):  # which takes long: what can be refused is refused before
            for plan in plans:
                check_machine(plan)
            on_main(lambda: check_disk(plans[-1]))
            on_main(lambda: tell_before_writing(config, plans[-1]))
        written = with_written_data(config)
        if written is not config:
            config, plans = written, make_plans(written)
            tasks = None if tasks is None else plan_tasks(plans)
        data = plans[0].task.read_on_all(plans[0].models)
        if tasks is not None:
            tasks.check_data()
        run_chain(plans, data, then=None if tasks is None else tasks.conduct)


def make_plans(config: RunConfig, ranks: int | None = None) -> list[Plan]:
    """Load the modules that planning needs and return the runs that a configuration describes, on so many ranks."""
    # This import loads thousands of modules, none of which is garbage: it takes 4.0 CPU seconds in place of the 4.8 of
    # an import with garbage collection, which is a sixth of a dry run.
    collects = gc.isenabled()
    gc.disable()
    try:
        from llmdistill.training import plan

        return plan.make_plans(config, ranks)
    finally:
        if collects:
            gc.enable()


def check_places(plans: Sequence[Plan], *, thorough: bool = True) -> None:
    """Check what a run reads and where it writes, its data as in `Task.check_files`. Raises UserError for a mistake."""
    from llmdistill.training.run_folder import check_settings

    check_writable(plans[-1].folder, "--output_dir")
    check_settings(plans[-1].recorded)
    statistics = plans[-1].config.student.factorize.calibration.folder
    if statistics is not None and not Path(statistics).exists():  # one that is there may only be read
        check_writable(Path(statistics), "--student.factorize.calibration.folder")
    if launched_ranks_of_node() == launched_ranks():  # another node may have no data, only the tokens that rank 0 makes
        plans[0].task.check_files(thorough=thorough)


if __name__ == "__main__":
    sys.exit(main())
