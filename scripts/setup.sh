# shellcheck shell=bash disable=SC2034,SC2015  # lists are for the sourcing scripts; die ends them
# Shared by ./run, ./test and .ci/run: installs what is missing, finds torch, configures and builds.
# Sourced, with the project as the working directory. Nothing here uses the network when everything
# is installed.

# Keep in step with house rules: the versions that the C++ side is built and tested with.
torch_wheels=(torch==2.15.0 nvidia-cuda-runtime==13.2.75 nvidia-cuda-cupti==13.2.86)
torch_oldest=2.11
torch_venv=build/torch-venv

packages_build=(g++ cmake ninja-build ccache libhwy-dev libcli11-dev nlohmann-json3-dev
  libtomlplusplus-dev libutf8proc-dev
                libxxhash-dev zlib1g-dev liblzma-dev)
packages_text=(bible-kjv bible-kjv-text)
packages_test=(libgtest-dev libgmock-dev librapidcheck-dev)
packages_ci=(clang-14 libclang-rt-14-dev clang-format-14 clang-tidy-14 libbenchmark-dev)
packages_venv=(python3-venv ca-certificates)

install_allowed=yes  # --no-install sets it to no

say() { printf '%s\n' "$*"; }
die() { printf '%s: %s\n' "${0##*/}" "$*" >&2; exit 1; }
usage_error() { printf "%s: %s (--help shows the options)\n" "${0##*/}" "$*" >&2; exit 2; }

# One build at a time; the lock goes with the process.
start_setup() {
  mkdir -p build 2>/dev/null && [ -w build ] ||
    die "cannot write to $PWD/build (was it made by another user, with sudo?)"
  if command -v flock >/dev/null; then
    exec 9>build/.lock
    flock -n 9 || { say "Waiting for another ./run or ./test in $PWD"; flock 9; }
  fi
  check_platform
  local cache=${CCACHE_DIR:-${XDG_CACHE_HOME:-${HOME:-/nonexistent}/.cache}/ccache}
  mkdir -p "$cache" 2>/dev/null && [ -w "$cache" ] || export CCACHE_DIR=$PWD/build/ccache
  export CCACHE_BASEDIR=${CCACHE_BASEDIR:-$PWD}  # another build folder or checkout finds it, too
}

check_platform() {
  local system machine
  system=$(uname -s) machine=$(uname -m)
  case $system-$machine in
    Linux-x86_64 | Linux-aarch64) ;;
    *) die "Cistern runs on Linux on x86-64 (and should on aarch64); this is $system on $machine" ;;
  esac
}

has_apt() { command -v apt-get >/dev/null && command -v dpkg-query >/dev/null; }

# missing_packages NAME...: prints the names of those that are not installed. A program found in the
# PATH counts, whoever installed it.
missing_packages() {
  local name program installed=
  if has_apt; then
    # shellcheck disable=SC2016
    # dpkg-query exits with 1 if some are not installed.
    installed=$(dpkg-query -W -f '${db:Status-Status} ${Package}\n' "$@" 2>/dev/null |
      sed -n 's/^installed //p') || true
  fi
  for name in "$@"; do
    grep -qxF -- "$name" <<<"$installed" && continue
    case $name in
      ninja-build) program=ninja ;;
      bible-kjv) program=bible ;;
      g++ | ccache | clang-14 | clang-format-14 | clang-tidy-14) program=$name ;;
      cmake) program=; cmake_is_new && continue ;;
      *) program= ;;
    esac
    [ -n "$program" ] && command -v "$program" >/dev/null && continue
    # Without dpkg, only programs can be looked for: CMake finds the libraries, or says which is
    # missing.
    if ! has_apt; then case $name in g++ | cmake | ninja-build) ;; *) continue ;; esac; fi
    printf '%s\n' "$name"
  done
}

cmake_is_new() {  # 3.25 or newer
  local version
  version=$(cmake --version 2>/dev/null | sed -n '1s/[^0-9]*//p') && [ -n "$version" ] || return 1
  [ "$(printf '3.25\n%s\n' "$version" | sort -V | head -n 1)" = 3.25 ]
}

# apt_get ARGUMENT...: as root, or through sudo without a password.
apt_get() {
  local options=(-q -o DPkg::Lock::Timeout=300)
  if [ "$(id -u)" = 0 ]; then
    DEBIAN_FRONTEND=noninteractive apt-get "${options[@]}" "$@" </dev/null
  else  # sudo drops the environment, the proxy with it
    [ -z "${http_proxy:-}" ] || options+=(-o "Acquire::http::Proxy=$http_proxy")
    [ -z "${https_proxy:-}" ] || options+=(-o "Acquire::https::Proxy=$https_proxy")
    sudo -n apt-get "${options[@]}" "$@" </dev/null
  fi
}

# install_packages NAME...: what is missing of these, with one apt-get. Says what and how big; never
# asks.
install_packages() {
  local list missing command size log=build/apt.log
  list=$(missing_packages "$@")
  [ -n "$list" ] || return 0
  mapfile -t missing <<<"$list"
  has_apt || die "no apt-get here, and these packages are missing: ${missing[*]}" \
    "(Debian's names; install the equivalents)"
  command="apt-get install --no-install-recommends ${missing[*]}"
  if [ "$install_allowed" = no ]; then
    die "these packages are missing, and --no-install was given; as root:
  $command"
  fi
  if [ "$(id -u)" != 0 ] && ! sudo -n apt-get --version >/dev/null 2>&1; then
    die "these packages are missing, and only root can install them. Type this, then start $0 again:
  sudo $command"
  fi
  say "Installing from Debian, to build and run Cistern: ${missing[*]}"
  apt_get update >"$log" 2>&1 || say "(apt-get update failed; trying with the present lists)"
  size=$(LC_ALL=C apt-get -y -o Debug::NoLocking=1 --no-install-recommends --print-uris \
      install "${missing[@]}" 2>/dev/null </dev/null |
    awk '$3 ~ /^[0-9]+$/ { bytes += $3; ++n }
      END { if (n) printf "%d packages with dependencies, %.0f MB to download", n, bytes / 1e6 }'
  ) || true
  [ -z "$size" ] || say "  $size"
  if ! apt_get install -y --no-install-recommends "${missing[@]}" >>"$log" 2>&1; then
    tail -n 20 "$log" >&2
    die "apt-get failed (all of it: $PWD/$log). To try by hand, as root:
  apt-get update && $command"
  fi
}

# torch_of_python PYTHON: the folder of that Python's torch if it is new enough to build with.
# Nothing is imported.
torch_of_python() {
  "$1" - "$torch_oldest" 2>/dev/null <<'PY'
import importlib.util, os, re, sys
spec = importlib.util.find_spec("torch")
folder = spec.submodule_search_locations[0]
version = re.search(r"__version__ = '(\d+)\.(\d+)", open(os.path.join(folder, "version.py")).read())
oldest = tuple(int(n) for n in sys.argv[1].split("."))
library = os.path.join(folder, "lib", "libtorch_cpu.so")
usable = tuple(int(n) for n in version.groups()) >= oldest and os.path.exists(library)
print(folder) if usable else sys.exit(1)
PY
}

# torch_in FOLDER: the torch of site-packages/torch, or of a virtual environment's root.
torch_in() {
  local folder
  for folder in "$1" "$1"/lib/python3*/site-packages/torch; do
    if [ -e "$folder/lib/libtorch_cpu.so" ]; then (cd "$folder" && pwd); return; fi
  done
  return 1
}

# All three wheels there, and whole: pip writes RECORD last.
torch_venv_is_whole() {
  local wheel name record
  for wheel in "${torch_wheels[@]}"; do
    name=${wheel%%==*}
    name=${name//-/_}-${wheel##*==}
    record=$(compgen -G "$torch_venv/lib/python3*/site-packages/$name*.dist-info/RECORD") ||
      return 1
    [ -s "${record%%$'\n'*}" ] || return 1
  done
}

# find_torch: sets torch_dir to the torch to build with, or to nothing when it has to be installed.
find_torch() {
  torch_dir=
  if [ -n "${CISTERN_TORCH:-}" ]; then
    torch_dir=$(torch_in "$CISTERN_TORCH") ||
      die "CISTERN_TORCH=$CISTERN_TORCH holds no lib/libtorch_cpu.so"
  elif command -v python3 >/dev/null && torch_dir=$(torch_of_python python3); then
    :
  elif torch_venv_is_whole; then
    torch_dir=$(torch_in "$torch_venv")
  fi
}

# A Python that can make a virtual environment and for which there are wheels.
venv_python() {
  local python
  for python in /usr/bin/python3 python3; do
    if "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null
    then say "$python"; return; fi
  done
  return 1
}

install_torch() {
  local python free log=build/pip.log
  if [ "$install_allowed" = no ]; then
    die "no torch $torch_oldest or newer found, and --no-install was given." \
      "Set CISTERN_TORCH to your site-packages/torch, or:
  python3 -m venv $PWD/$torch_venv &&
    $PWD/$torch_venv/bin/python -m pip install --no-deps ${torch_wheels[*]}"
  fi
  python=$(venv_python) || die "found no python3 (3.10 or newer, with venv) to install torch;" \
    "set CISTERN_TORCH to your site-packages/torch"
  free=$(df -Pk build | awk 'NR == 2 { print $4 }')
  [ "${free:-0}" -gt 2200000 ] || die "torch needs 1.3 GB on disk and 0.6 GB during the download;" \
    "$PWD/build has $((free / 1000)) MB free"
  say "Installing torch, the tensor library that Cistern is built on, from PyPI into $torch_venv:" \
    "${torch_wheels[*]}"
  say "  0.54 GB to download, 1.3 GB on disk, nothing outside this folder"
  if ! { "$python" -m venv --clear "$torch_venv" &&
         "$torch_venv/bin/python" -m pip install --no-input --disable-pip-version-check --no-deps \
           --progress-bar off "${torch_wheels[@]}"; } \
       </dev/null >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    die "torch could not be installed (all of it: $PWD/$log)"
  fi
  torch_dir=$(torch_in "$torch_venv") ||
    die "pip installed no torch into $PWD/$torch_venv (its output: $PWD/$log)"
}

# install_all NAME...: these packages and a torch.
install_all() {
  local packages=("$@")
  find_torch
  if [ -z "$torch_dir" ] && {
      ! venv_python >/dev/null || [ ! -e /etc/ssl/certs/ca-certificates.crt ]; }; then
    packages+=("${packages_venv[@]}")
  fi
  install_packages "${packages[@]}"
  [ -n "$torch_dir" ] || install_torch
}

# As many compilers at a time as there are cores, and memory: a file that sees torch takes 1.4 GB.
build_jobs() {
  local cores memory
  cores=$(nproc)
  memory=$(awk '/^MemAvailable:/ { print int($2 / 1400000) }' /proc/meminfo)
  [ "$memory" -ge 1 ] || memory=1
  say $((cores < memory ? cores : memory))
}

# configure PRESET [-DNAME=VALUE...]: only when the folder was not configured so already.
configure() {
  local preset=$1 setting fresh=() cache=build/$1/CMakeCache.txt log=build/$1.configure.log
  shift
  if [ -e "$cache" ] && [ -e "build/$preset/build.ninja" ]; then
    local same=yes
    if ! grep -qxF "CMAKE_HOME_DIRECTORY:INTERNAL=$PWD" "$cache"; then same=no fresh=(--fresh); fi
    for setting in "$@"; do
      setting=${setting#-D}
      grep -qE "^${setting%%=*}:[A-Z]+=" "$cache" &&
        [ "$(sed -n "s|^${setting%%=*}:[A-Z]*=||p" "$cache")" = "${setting#*=}" ] || same=no
    done
    [ $same = no ] || return 0
  fi
  if ! cmake --preset "$preset" "${fresh[@]}" "$@" >"$log" 2>&1; then
    tail -n 40 "$log" >&2
    die "cmake could not configure build/$preset (all of it: $PWD/$log)"
  fi
}

# build PRESET [TARGET...]: quiet unless it fails, or with ninja's own line on a terminal.
build() {
  local preset=$1 log=build/$1.build.log started=$SECONDS command
  shift
  command=(cmake --build "build/$preset" --parallel "$(build_jobs)")
  [ $# -eq 0 ] || command+=(--target "$@")
  [ -s "build/$preset/.ninja_log" ] ||
    say "Building build/$preset (minutes, the first time; $PWD/$log)"
  if [ -t 1 ] && [ "${TERM:-dumb}" != dumb ]; then
    "${command[@]}" || die "the build failed"
  else
    if ! "${command[@]}" >"$log" 2>&1; then
      grep -E -A 12 'FAILED|error' "$log" | head -n 60 >&2 || tail -n 40 "$log" >&2
      die "the build failed (all of it: $PWD/$log)"
    fi
  fi
  [ $((SECONDS - started)) -lt 3 ] || say "Built build/$preset in $((SECONDS - started)) s"
}

# configured_with PRESET NAME: its value in that build folder; nothing where that is not there yet.
configured_with() { sed -n "s/^$2:[A-Z]*=//p" "build/$1/CMakeCache.txt" 2>/dev/null || true; }

end_setup() { exec 9>&-; }
