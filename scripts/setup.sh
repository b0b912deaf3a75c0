# Sourced by quickstart.sh and test.sh: makes .venv at the repository root and installs into it, once.
# Environment: PYTHON chooses the interpreter; VENV another place for the environment.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${VENV:-$ROOT/.venv}"

# In CI each file that is installed must have its hash in scripts/hashes.txt, which knows the files of one platform.
HAS_HASHES='import platform, sys; sys.exit((sys.version_info[:2], sys.platform, platform.machine()) != ((3, 11), "linux", "x86_64"))'

fail() {
    echo "error: $1" >&2
    exit 2
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10}; do
        if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
            echo "$candidate"
            return
        fi
    done
    candidate="${PYTHON:-python3}"
    fail "no Python 3.10 or newer was found ($candidate is $("$candidate" --version 2>/dev/null || echo missing)): install one, or name it with PYTHON=/path/to/python."
}

note_missing_compiler() {
    local header
    header="$("$1" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')/Python.h"
    if ! { command -v "${CXX:-c++}" || command -v g++; } >/dev/null || [ ! -f "$header" ]; then
        echo "note: without a C++ compiler and Python's headers (Debian and Ubuntu: apt-get install g++ python3-dev) there is no train.compile and no optimizer on the CPU (offload); all else works."
    fi
}

install() {
    local python stamp
    # What was installed, as a checksum of what says it: a changed pyproject or constraint installs anew, nothing else does.
    stamp="$(cat "$ROOT/pyproject.toml" "$ROOT/scripts/constraints.txt" "$ROOT/scripts/hashes.txt" | cksum)"
    if [ "$(cat "$VENV/.installed" 2>/dev/null || true)" = "$stamp" ]; then
        return
    fi
    python="$(find_python)"
    note_missing_compiler "$python"
    if [ ! -x "$VENV/bin/python" ]; then
        echo "Making $VENV with $("$python" --version)"
        "$python" -m venv "$VENV" || fail "$python cannot make a virtual environment (Debian and Ubuntu: apt-get install python3-venv)."
    fi
    echo "Installing (a few minutes the first time)"
    # torch first: what comes after then finds its requirement met, whichever build this machine offers.
    "$VENV/bin/python" -m pip install --quiet --quiet --disable-pip-version-check "$(grep '^torch==' "$ROOT/scripts/constraints.txt")"
    if [ "${CI:-}" = true ] && "$VENV/bin/python" -c "$HAS_HASHES"; then
        # The list is complete, and pip would refuse that one library asks for another with an extra.
        "$VENV/bin/python" -m pip install --quiet --quiet --disable-pip-version-check --require-hashes --no-deps -r "$ROOT/scripts/hashes.txt"
    fi
    "$VENV/bin/python" -m pip install --quiet --quiet --disable-pip-version-check -c "$ROOT/scripts/constraints.txt" -e "$ROOT[dev,docs]"
    echo "$stamp" >"$VENV/.installed"
}

install
# The deepspeed launcher looks for ninja and python on the path.
export PATH="$VENV/bin:$PATH"
# DeepSpeed's extensions are compiled for this environment alone: one environment would overwrite those of another.
export TORCH_EXTENSIONS_DIR="${TORCH_EXTENSIONS_DIR:-$VENV/torch_extensions}"
# Threads that spin for long while they wait make everything several times slower where other programs use the cores too;
# threads that sleep at once make the small operations of a loss twice as slow where none does.
export GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-1000}"
cd "$ROOT"
