#!/usr/bin/env bash
# Trains on this machine's CPU under mpirun.
#
#   launch/mpirun-cpu.sh NP CONFIG [key=value ...]
#   launch/mpirun-cpu.sh 4 configs/quickstart.yaml
#
# More processes than cores are allowed; they then share the cores and give way while they wait.
set -euo pipefail
if (($# < 2)); then
  sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0" >&2
  exit 2
fi
np=$1
shift
bin=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.venv/bin" && pwd)
PATH=$bin:$PATH

options=()
if mpirun --version | grep -q 'Open MPI\|OpenRTE'; then
  options=(--oversubscribe --bind-to none --mca mpi_yield_when_idle 1 -x OMP_NUM_THREADS)
  if ((EUID == 0)); then options+=(--allow-run-as-root); fi
fi
cores=$(nproc)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > np ? cores / np : 1))}
exec mpirun -np "$np" "${options[@]}" "$bin/python" -m hvdcomp train "$@"
