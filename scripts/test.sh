#!/usr/bin/env bash
# Sets up what is missing and runs the tests but for the slow ones; with --all, as in CI, those too.
# Further arguments go to pytest and choose for themselves, for example: scripts/test.sh tests/unit -k svd
if [ $# = 0 ]; then set -- -m "not slow"; elif [ "$1" = --all ]; then shift; fi
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
# Two tests at a time (`-n 0`: one), each on one thread: most are too small for more.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# A file at a time, whose fixtures are then made once, in the order of their names: those of tests/dist take the longest and
# begin at once, and the many short ones after them keep both workers busy to the end.
exec python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
