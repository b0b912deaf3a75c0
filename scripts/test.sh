#!/usr/bin/env bash
# Sets up what is missing and runs the tests. Further arguments go to pytest, for example: scripts/test.sh tests/unit -k svd
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec python -m pytest "$@"
