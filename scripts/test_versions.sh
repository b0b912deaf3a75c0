#!/usr/bin/env bash
# Tests with the lowest or the newest versions that pyproject.toml allows: scripts/test_versions.sh lowest|newest
# [ARGUMENTS OF PYTEST]. It makes .venv-lowest-3.10 and the like with $PYTHON (by default python3) and uv;
# UV_TORCH_BACKEND=cpu takes torch without CUDA.
set -euo pipefail
cd "$(dirname "$0")/.."
case "${1:-}" in
lowest) resolution=lowest-direct ;;
newest) resolution=highest ;;
*) echo "error: say lowest or newest" >&2 && exit 2 ;;
esac
python="${PYTHON:-python3}"
venv="$PWD/.venv-$1-$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
shift
if [ $# = 0 ]; then set -- -m "not slow"; fi
"$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check uv
export VIRTUAL_ENV="$venv" PATH="$venv/bin:$PATH"
uv pip compile --quiet --resolution "$resolution" --extra dev pyproject.toml | uv pip install --quiet -r -
uv pip install --quiet --no-deps -e .
export TORCH_EXTENSIONS_DIR="$venv/torch_extensions" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-1000}"
exec python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
