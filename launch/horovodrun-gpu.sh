#!/usr/bin/env bash
# Trains on a GPU cluster under horovodrun, one process a GPU. The project's folder with .venv in it, and HVDCOMP_CACHE
# (~/.cache/hvdcomp) if the MPI is PyPI's, must lie at the same path on every host, as on a shared file system; ssh must
# reach the hosts without a password.
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
bin=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.venv/bin" && pwd)
# Horovod's own reader of host files knows no comments and no empty lines.
hosts=$(sed -n 's/^[[:space:]]*\([^#[:space:]]\{1,\}\)[[:space:]].*slots=\([0-9]\{1,\}\).*/\1:\2/p' "$hostfile" | paste -sd, -)
np=$(tr ',' '\n' <<<"$hosts" | awk -F: '{ n += $2 } END { print n + 0 }')
if ((np == 0)); then
  echo "$hostfile: no 'HOST slots=N' line" >&2
  exit 2
fi
read -ra options <<<"${HOROVODRUN_OPTIONS:---gloo}"
exec "$bin/horovodrun" -np "$np" -H "$hosts" "${options[@]}" "$bin/python" -m hvdcomp train "$@"
