#!/usr/bin/env bash
# Sets up what is missing, then trains on two Horovod workers with adaptive compression (a few minutes).
# Arguments go on to `hvdcomp train`:
#
#   launch/quickstart.sh compression=none
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
launch/setup.sh
exec .venv/bin/hvdcomp train configs/quickstart.yaml -np 2 "$@"
