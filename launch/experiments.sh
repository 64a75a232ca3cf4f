#!/usr/bin/env bash
# Sets up what is missing, then trains the scaled-down twins of the papers' experiments, one after the other, on two
# workers (20 minutes on two idle cores). Arguments go on to `hvdcomp compare`:
#
#   launch/experiments.sh --seeds 0,1,2    three seeds instead of two
#
# Started again it goes on where it was interrupted. runs/PAPER/EXPERIMENT.twin/comparison.md has what came out.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
launch/setup.sh
export OMP_NUM_THREADS=1
for config in configs/*/*.twin.yaml; do
  echo "== $config"
  .venv/bin/hvdcomp compare "$config" "$@"
done
