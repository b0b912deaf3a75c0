"""Breaks of launchers, ranks, signals, files and the settings that recipes replace."""

from __future__ import annotations

from breaks import Break

RUNTIME = "llmdistill/runtime"
RUNTIME_TESTS = "tests/unit/runtime"
OVERRIDES = "tests/unit/config/test_overrides.py"

BREAKS = [
    Break(
        "every-rank-speaks",
        f"{RUNTIME}/processes.py",
        "os.SEEK_CUR) == 1",
        "os.SEEK_CUR) >= 1",
        f"{RUNTIME_TESTS}/test_processes.py::test_the_first_rank_of_a_node_says_why",
    ),
    Break(
        "reaped-rank-still-runs",
        f"{RUNTIME}/processes.py",
        "except psutil.NoSuchProcess:\n        return True",
        "except psutil.NoSuchProcess:\n        return False",
        f"{RUNTIME_TESTS}/test_processes.py::test_a_rank_that_ends_is_named_once_unless_it_says_why",
    ),
    Break(
        "launcher-ends-well",
        f"{RUNTIME}/launch.py",
        "raise SystemExit(code if code >= 0 else 128 - code)",
        "raise SystemExit(0)",
        f"{RUNTIME_TESTS}/test_launch.py::test_the_failure_of_a_rank_ends_the_others",
    ),
    Break(
        "last-number-of-a-list-of-nodes",
        f"{RUNTIME}/launch.py",
        r'r"\[(\w+)[^]]*\]"',
        r'r"\[[^]]*?(\w+)\]"',
        f"{RUNTIME_TESTS}/test_launch.py::test_lists_of_nodes_and_tasks",
    ),
    Break(
        "loopback-between-nodes",
        f"{RUNTIME}/launch.py",
        'if not ipaddress.ip_address(each.split("%")[0]).is_loopback',
        'if ipaddress.ip_address(each.split("%")[0])',
        f"{RUNTIME_TESTS}/test_launch.py::test_nodes_talk_on_the_interface_towards_rank_0",
    ),
    Break(
        "waiting-is-interrupted",
        f"{RUNTIME}/signals.py",
        "        if not _state.waits:\n            raise",
        "        if True:\n            raise",
        f"{RUNTIME_TESTS}/test_signals.py::test_a_block_that_waits_sees_the_signal_and_is_not_interrupted",
    ),
    Break(
        "second-ctrl-c-waits",
        f"{RUNTIME}/signals.py",
        "elif number == signal.SIGINT and",
        "elif number == signal.SIGHUP and",
        f"{RUNTIME_TESTS}/test_signals.py::test_a_second_ctrl_c_ends_at_once_and_a_second_sigterm_does_not",
    ),
    Break(
        "all-hosts-are-asked",
        f"{RUNTIME}/hosts.py",
        'hosts[: int(given["--num_nodes"])]',
        "hosts[:]",
        f"{RUNTIME_TESTS}/test_hosts.py::test_only_hosts_of_the_run_are_asked",
    ),
    Break(
        "freed-tensors-count",
        f"{RUNTIME}/tracing.py",
        "self._bytes -= size",
        "self._bytes -= 0",
        f"{RUNTIME_TESTS}/test_tracing.py::test_peak_by_part_starts_again_when_it_is_taken",
    ),
    Break(
        "auto-is-left-to-deepspeed",
        f"{RUNTIME}/ds_config.py",
        'if value == "auto":',
        "if False:",
        f"{RUNTIME_TESTS}/test_ds_config.py::test_auto_that_nobody_fills_is_an_error",
    ),
    Break(
        "null-replaces-rivals",
        "llmdistill/config/marks.py",
        "value not in unless",
        "value not in ()",
        f"{OVERRIDES}::test_settings_that_exclude_each_other_replace_each_other",
    ),
    Break(
        "repeated-setting-replaces-rivals",
        "llmdistill/config/overrides.py",
        "if key in below and value == below[key]:",
        "if False:",
        f"{OVERRIDES}::test_settings_that_exclude_each_other_replace_each_other",
    ),
    Break(
        "abandoned-folders-stay",
        "llmdistill/files.py",
        "                shutil.rmtree(left)",
        "                pass",
        "tests/unit/test_files.py::test_what_a_kill_has_left_is_removed_and_what_is_being_written_is_not",
    ),
]
