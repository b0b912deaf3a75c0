#!/usr/bin/env bash
# Tortures the commands with kills, signals, full disks and long runs, and prints a page of figures, in under
# 30 minutes: see scripts/torture/torture.py --help, which takes all further arguments. Sets up what is missing first.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec python scripts/torture/torture.py "$@"
