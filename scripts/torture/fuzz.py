"""Tries the readers of files with inputs that atheris draws by the coverage of llmdistill's own code.

    python scripts/torture/fuzz.py --seconds 60                        # each reader of tests/readers.py for a minute
    python scripts/torture/fuzz.py --seconds 600 --reader parquet      # one of them
    python scripts/torture/fuzz.py --reader parquet --repeat FILE      # a finding again, with its traceback

The only outcome besides success is one UserError. A traceback, an input that takes more than 20 seconds, and a reader
that writes outside its folder, starts a program or opens a connection are findings. Exit code 1 if there is any.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import multiprocessing
import os
import pkgutil
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
LIBRARIES = ("torch", "transformers", "datasets", "deepspeed", "peft", "pyarrow.parquet", "hypothesis", "pytest")
"""Imported before ours, so that atheris does not look at their code: that alone would take minutes."""
HANGS = 20
"""Seconds after which an input counts as one that hangs."""
LONGEST = 100_000
"""Bytes of an input."""
LAST = "last-input"
"""The input that was tried last: the finding, if there is one."""
FORBIDDEN = ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.system", "socket.connect", "pickle.find_class")
"""Audit events (PEP 578) that no reader may cause."""
CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "shutil.rmtree")
"""Audit events whose first argument is a path that must lie in the folder."""


class Watch:
    """Remembers what a reader did that it may not do, between `begin` and `end`."""

    def __init__(self, *folders: Path) -> None:
        """`folders` are those in which the reader may write."""
        self._folders = tuple(f"{folder.resolve()}{os.sep}" for folder in folders)
        self._seen: list[str] | None = None
        sys.addaudithook(self._hook)

    def begin(self) -> None:
        self._seen = []

    def end(self) -> None:
        seen, self._seen = self._seen, None
        assert not seen, f"the reader did {seen[0]}"

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._seen is None:
            return
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if event in FORBIDDEN or ((writes or event in CHANGES) and self._is_outside(arguments[0])):
            self._seen.append(f"{event} {arguments[:2]}")

    def _is_outside(self, path: Any) -> bool:
        return not isinstance(path, int) and not f"{Path(os.fsdecode(path)).resolve()}{os.sep}".startswith(
            self._folders
        )


def load(atheris: Any) -> Any:
    """Import the readers with coverage of llmdistill's own code, and return them by their names."""
    with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed says that it found no GPU
        for name in LIBRARIES:
            importlib.import_module(name)
    covered = atheris.instrument_imports(include=["llmdistill"], enable_loader_override=False)
    with contextlib.redirect_stderr(io.StringIO()), covered:  # atheris names every module
        readers = importlib.import_module("readers").READERS
        package = importlib.import_module("llmdistill.tasks")
        for module in pkgutil.iter_modules(package.__path__, "llmdistill.tasks."):
            importlib.import_module(module.name)
    return readers


def be_fuzzer(atheris: Any, reader: Any, folder: Path, options: Sequence[str]) -> NoReturn:
    """Try a reader until libFuzzer ends this process."""
    hostile = importlib.import_module("hostile")
    errors = importlib.import_module("llmdistill.errors")
    work = folder / "files"
    watch = Watch(work, Path(os.environ["HF_HOME"]))
    sys.dont_write_bytecode = True

    def one_input(data: bytes) -> None:
        (folder / LAST).write_bytes(data)
        number, content = (data[0], data[1:]) if data else (0, b"")
        path = reader.write(work, number, lambda _: content)
        watch.begin()
        try:
            reader.read(path)
        except errors.UserError as error:
            hostile.check_sentence(error)
        watch.end()

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        """Half of the time as libFuzzer does, half of the time as the property tests do."""
        if seed % 2 or not data:
            return bytes(atheris.Mutate(data, most))
        return (data[:1] + hostile.damaged(data[1:], seed))[:most]

    atheris.Setup([sys.argv[0], *options], one_input, custom_mutator=mutate)
    atheris.Fuzz()
    os._exit(0)


def try_reader(atheris: Any, reader: Any, folder: Path, seconds: int) -> tuple[str, str | None]:
    """Fuzz a reader for some seconds in a fork, in a folder of its own.

    Returns how many inputs it took and how many edges of the code the valid files and all inputs reach, and the
    finding, if there is one.
    """
    seeds, log = folder / "seeds", folder / "log.txt"
    seeds.mkdir(parents=True)
    for number, content in enumerate(reader.files.values()):
        (seeds / f"valid-{number}").write_bytes(bytes([number]) + content)
    options = [f"-max_total_time={seconds}", f"-timeout={HANGS}", f"-max_len={LONGEST}", "-rss_limit_mb=8192"]
    options += ["-seed=1", f"-artifact_prefix={folder}{os.sep}", "-print_final_stats=1", str(seeds)]

    def be_child() -> None:
        target = os.open(log, os.O_WRONLY | os.O_CREAT)
        for number in (1, 2):
            os.dup2(target, number)
        be_fuzzer(atheris, reader, folder, options)

    child = multiprocessing.get_context("fork").Process(target=be_child)
    child.start()
    child.join(seconds + 2 * HANGS + 10)
    if child.exitcode is None:
        child.kill()
        child.join()
    said = log.read_text(encoding="utf-8", errors="replace")
    edges = re.findall(r"^#\d+\s+\w+\s+cov: (\d+)", said, re.MULTILINE) or ["0"]
    inputs = max((int(each) for each in re.findall(r"^#(\d+)", said, re.MULTILINE)), default=0)
    finding = None
    if child.exitcode == -signal.SIGKILL or "ERROR: libFuzzer: timeout" in said:
        finding = f"it takes more than {HANGS} s"
    elif child.exitcode != 0:
        exceptions = re.findall(r"Uncaught Python exception: ===\n(.*)", said)
        finding = exceptions[-1] if exceptions else f"exit code {child.exitcode}: {said[-200:]!r}"
    return f"{inputs:9,} {f'{edges[0]} → {edges[-1]}':>12}", finding


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=60, help="for each reader")
    parser.add_argument("--reader", help="this one alone, by its name in tests/readers.py")
    parser.add_argument("--repeat", type=Path, help="the file of a finding; needs --reader")
    arguments = parser.parse_args()
    if arguments.repeat is not None and arguments.reader is None:
        parser.error("--repeat needs --reader: the file is an input of it")
    try:
        atheris: Any = importlib.import_module("atheris")
    except ImportError:
        print("error: atheris is not installed; pip install -e '.[fuzz]' (Linux, Python 3.11 to 3.13)", file=sys.stderr)
        return 2
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    os.environ["HF_HOME"] = str(folder / "libraries")  # where the datasets library makes the folders of its cache
    readers = load(atheris)
    if arguments.reader not in (None, *readers):
        parser.error(f"--reader {arguments.reader}: there are {', '.join(readers)}")
    if arguments.repeat is not None:
        be_fuzzer(atheris, readers[arguments.reader], folder, [str(arguments.repeat.resolve())])
    found = 0
    print(f"{'reader':16} {'inputs':>9} {'edges':>12}  finding", flush=True)
    for name in readers if arguments.reader is None else [arguments.reader]:
        own = folder / re.sub(r"\W", "-", name)
        tried, finding = try_reader(atheris, readers[name], own, arguments.seconds)
        print(f"{name:16} {tried}  {finding or 'none'}", flush=True)
        if finding is not None:
            found += 1
            print(f"  python scripts/torture/fuzz.py --reader '{name}' --repeat {own / LAST}", flush=True)
    print(f"{found} findings")
    if found == 0:
        shutil.rmtree(folder)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
