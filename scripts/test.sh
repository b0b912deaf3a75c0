#!/usr/bin/env bash
# Sets up what is missing and runs the tests. Further arguments go to pytest, for example: scripts/test.sh tests/unit -k svd
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
# Two tests at a time (`-n 0`: one), each on one thread: most are too small for more.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# In the order of their names, so that those of tests/dist, which take the longest, begin at once.
exec python -m pytest -n 2 --dist loadscope --no-loadscope-reorder "$@"
