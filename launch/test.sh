#!/usr/bin/env bash
# Sets up what is missing, then runs the tests. Arguments go on to pytest:
#
#   launch/test.sh                     all tests
#   launch/test.sh -m 'not ranks'      without those that start Horovod processes
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
launch/setup.sh
# One thread a process: the ranks of a test share the cores.
export OMP_NUM_THREADS=1
exec .venv/bin/python -m pytest "$@"
