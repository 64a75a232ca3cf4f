#!/usr/bin/env bash
# Trains on a GPU cluster under horovodrun, one process a GPU. The project's folder, .venv in it and HVDCOMP_CACHE must
# lie at the same path on every host (a shared file system), and ssh must reach the hosts without a password.
#
#   launch/horovodrun-gpu.sh HOSTFILE CONFIG [key=value ...]
#
# HOSTFILE has a line for each host, with its number of GPUs:
#
#   node1 slots=8
#   node2 slots=8
#
#   HOROVODRUN_OPTIONS   more options, e.g. "--network-interface eth1" or "--mpi" (default: --gloo)
set -euo pipefail
if (($# < 2)); then
  sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0" >&2
  exit 2
fi
hostfile=$1
shift
cd "$(dirname "${BASH_SOURCE[0]}")/.."
np=$(sed -n 's/^[^#]*slots=\([0-9]*\).*/\1/p' "$hostfile" | awk '{ n += $1 } END { print n + 0 }')
if ((np == 0)); then
  echo "$hostfile: no 'HOST slots=N' line" >&2
  exit 2
fi
read -ra options <<<"${HOROVODRUN_OPTIONS:---gloo}"
exec .venv/bin/horovodrun -np "$np" --hostfile "$hostfile" "${options[@]}" "$PWD/.venv/bin/python" -m hvdcomp train "$@"
