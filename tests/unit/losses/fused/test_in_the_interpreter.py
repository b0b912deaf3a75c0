import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmdistill.losses.fused.triton import available

ROOT = Path(__file__).resolve().parents[4]


@pytest.mark.slow
@pytest.mark.skipif(available("cuda"), reason="the kernels' tests run on the GPU itself")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this is the interpreter")
def test_the_kernels_pass_their_tests_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    names = ("test_head.py", "test_attention.py", "test_features.py", "test_launches.py")
    files = [str(Path(__file__).with_name(name)) for name in names]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
