#!/usr/bin/env bash
# Installs missing packages: Debian packages with apt, Python packages into .venv. Make runs it
# before everything else; with nothing to install it returns within a second. Arguments are further
# Debian packages that one target needs (`tools/setup.sh clang-tidy`).
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf 'setup: %s\n' "$*" >&2; }

# A Python that the pinned versions support.
find_python() {
  local name
  for name in ${PYTHON:-} python3.11 python3.12 python3.13 python3; do
    if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$name"
      return
    fi
  done
  say "no Python 3.11 or later found: install one, or name it: make PYTHON=/path/to/python3.11"
  return 1
}

# Required for the build, then optional packages for faster builds or reads.
debian_packages() {
  local python=$1
  printf '%s\n' g++ libsimdjson-dev libfmt-dev libcli11-dev libhwy-dev libre2-dev libxxhash-dev \
    libgtest-dev libgmock-dev libbenchmark-dev libcurl4-openssl-dev libssl-dev ccache
  # Only Debian's own Python lacks these.
  "$python" -c 'import ensurepip' 2>/dev/null || printf 'python3-venv\n'
  "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
    printf 'python3-dev\n'
}

without_installed() {
  local package
  while read -r package; do
    dpkg-query -W -f '${db:Status-Abbrev}\n' "$package" 2>/dev/null | grep -q '^.i' ||
      printf '%s\n' "$package"
  done
}

# A failed installation is not fatal here: CMake fetches the libraries or names the missing ones.
install_debian_packages() {
  local missing=("$@") available=() package root=()
  [ "$(id -u)" = 0 ] || root=(sudo)
  say "installing ${missing[*]}"
  if "${root[@]}" apt-get update -q >&2; then
    for package in "${missing[@]}"; do
      if apt-cache show "$package" >/dev/null 2>&1; then
        available+=("$package")
      else
        say "apt has no package $package"
      fi
    done
    [ ${#available[@]} = 0 ] ||
      "${root[@]}" env DEBIAN_FRONTEND=noninteractive \
        apt-get install -q -y --no-install-recommends "${available[@]}" >&2 || true
  fi
  mapfile -t missing < <(printf '%s\n' "${missing[@]}" | without_installed)
  [ ${#missing[@]} = 0 ] || explain_missing "${missing[@]}"
}

explain_missing() {
  say "not installed: $*"
  say "install them yourself, or go on without: CMake fetches absent C++ libraries (FetchContent,"
  say "needs a network and git) and leaves what is optional (ccache) out"
}

install_python_packages() {
  local python=$1 stamp=.venv/setup.stamp hash
  hash=$("$python" --version; cat requirements.txt constraints.txt)
  hash=$(sha256sum <<<"$hash")
  if .venv/bin/python -c '' 2>/dev/null && [ "$(cat "$stamp" 2>/dev/null)" = "$hash" ]; then
    return
  fi
  .venv/bin/python -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear .venv
  rm -f "$stamp"
  say "installing Python packages into .venv"
  # Install the exact torch first, so its dependents cannot choose a different build.
  .venv/bin/python -m pip install -q -c constraints.txt torch==2.13.0
  .venv/bin/python -m pip install -q -c constraints.txt -r requirements.txt
  printf '%s\n' "$hash" >"$stamp"
}

python=$(find_python)
mapfile -t missing < <({ debian_packages "$python"; printf '%s\n' "$@"; } | grep . | {
  if command -v dpkg-query >/dev/null; then without_installed; else cat; fi; })
if [ ${#missing[@]} != 0 ]; then
  if command -v apt-get >/dev/null; then
    install_debian_packages "${missing[@]}"
  else
    explain_missing "${missing[@]} (named as in Debian)"
  fi
fi
install_python_packages "$python"
