#!/usr/bin/env bash
# Checks and measures the package on this machine's GPUs: see scripts/gpu_check/gpu_check.py --help, which takes all further
# arguments. Installs nothing but, where WHEELS names a folder of wheels, those, without any network.
# Environment: PYTHON chooses the interpreter, which has PyTorch; by default that of .venv, or else python3.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PYTHON="${PYTHON:-$([ -x "$ROOT/.venv/bin/python" ] && echo "$ROOT/.venv/bin/python" || echo python3)}"
if [ -n "${WHEELS:-}" ]; then
    "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-index --find-links "$WHEELS" "$WHEELS"/*.whl
fi
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1  # no installation is needed
if ! said="$("$PYTHON" -c 'import torch, llmdistill.report.pages' 2>&1)"; then
    echo "error: $PYTHON: ${said##*$'\n'}: name an interpreter that has it with PYTHON, or a folder of wheels with WHEELS." >&2
    exit 2
fi
exec "$PYTHON" "$ROOT/scripts/gpu_check/gpu_check.py" "$@"
