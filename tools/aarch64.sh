#!/usr/bin/env bash
# Two steps of `make aarch64`. `sysroot` makes a file system in build/aarch64/sysroot for the cross
# compiler and QEMU: Debian 12's libraries, headers and Python for arm64. `wheel` builds the wheel
# and runs it in QEMU, with numpy as the only other library. Nothing is installed outside of
# build/aarch64, except that root installs the cross compiler and QEMU.
set -euo pipefail
cd "$(dirname "$0")/.."
build=$PWD/build/aarch64
sysroot=$build/sysroot
emulated=(qemu-aarch64 -L "$sysroot")
python=("${emulated[@]}" "$sysroot/usr/bin/python3.11")
packages=(libc6-dev libstdc++-12-dev libsimdjson-dev libfmt-dev libcli11-dev libhwy-dev libre2-dev
  libxxhash-dev libgtest-dev libgmock-dev libcurl4-openssl-dev libssl-dev libpython3.11-dev
  python3.11)

report() { printf 'aarch64: %s\n' "$*" >&2; }

install_programs() {
  local programs=(g++-aarch64-linux-gnu qemu-user)
  if command -v aarch64-linux-gnu-g++ >/dev/null && command -v qemu-aarch64 >/dev/null; then
    return
  elif [ "$(id -u)" != 0 ]; then
    report "the cross compiler or QEMU is missing: sudo apt-get install ${programs[*]}"
    return 1
  fi
  apt-get update -q >&2
  DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${programs[@]}" >&2
}

# Runs apt with its own state, in which arm64 is the only architecture and nothing is installed.
private_apt() {
  local state=$build/apt sources=/etc/apt/sources.list.d/debian.sources
  [ -e "$sources" ] || sources=/etc/apt/sources.list
  mkdir -p "$state"/{lists,archives}/partial
  : >"$state/status"
  apt-get -q -o Dir::State="$state" -o Dir::State::status="$state/status" -o Dir::Cache="$state" \
    -o Dir::Etc::SourceList="$sources" -o Dir::Etc::SourceParts=- -o APT::Sandbox::User=root \
    -o APT::Architecture=arm64 -o APT::Architectures=arm64 "$@" >&2
}

make_sysroot() {
  local package link stamp=$sysroot/packages.stamp
  install_programs
  [ "$(cat "$stamp" 2>/dev/null)" != "${packages[*]}" ] || return 0
  report "downloading Debian's packages for arm64"
  rm -rf "$sysroot"
  mkdir -p "$sysroot"/usr/{bin,lib,sbin}
  ln -s usr/bin usr/lib usr/sbin "$sysroot"
  private_apt update
  private_apt install -y --no-install-recommends --download-only "${packages[@]}"
  for package in "$build"/apt/archives/*.deb; do
    dpkg-deb --fsys-tarfile "$package" | tar -x --keep-directory-symlink -C "$sysroot"
  done
  find "$sysroot" -type l -lname '/*' | while read -r link; do
    ln -snfr "$sysroot$(readlink "$link")" "$link"
  done
  printf '%s\n' "${packages[*]}" >"$stamp"
}

make_wheel() {
  local suffix
  suffix=$("${python[@]}" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
  rm -f "$build"/dist/loadstone-*.whl
  # The first two variables describe the target to scikit-build-core, which asks this Python.
  _PYTHON_HOST_PLATFORM=linux-aarch64 SETUPTOOLS_EXT_SUFFIX=$suffix \
    CMAKE_TOOLCHAIN_FILE=$PWD/cmake/aarch64.cmake \
    python -m pip wheel -q --no-deps --no-build-isolation -w "$build/dist" \
    --config-settings=build-dir="$build/wheel" \
    --config-settings=cmake.define.LOADSTONE_WERROR=ON \
    --config-settings=cmake.define.Python_INCLUDE_DIR="$sysroot/usr/include/python3.11" .
  ls "$build"/dist/loadstone-*.whl
}

# Installs the wheel and numpy in a folder, and converts a file there and back.
run_wheel() {
  rm -rf "$build/site" "$build/try"
  mkdir "$build/try"
  python -m pip install -q --target "$build/site" --only-binary=:all: -c constraints.txt \
    --platform linux_aarch64 --platform manylinux_2_28_aarch64 --platform manylinux_2_17_aarch64 \
    numpy "$build"/dist/loadstone-*.whl
  cd "$build/try"
  PYTHONPATH=$build/site "${python[@]}" - <<'END'
import json
import platform
from pathlib import Path

import loadstone
import numpy

name = "model.layers.0.mlp.up_proj.weight"
values = (numpy.arange(64 * 256) % 251 / 128 - 1).astype("f4").reshape(64, 256)
entry = {"dtype": "F32", "shape": values.shape, "data_offsets": [0, values.nbytes]}
header = json.dumps({name: entry}).encode()
Path("a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + values.tobytes())
loadstone.convert("a.safetensors", "b.safetensors", quantize="int8-channel")
loadstone.convert("b.safetensors", "c.safetensors", dequantize=True, dtype="float32")
read = numpy.frombuffer(Path("c.safetensors").read_bytes()[-values.nbytes :], "f4")
assert abs(read.reshape(values.shape) - values).max() <= 0.5 / 127, "the values differ"
assert loadstone.inspect("b.safetensors").total_bytes < values.nbytes / 3
print(f"loadstone {loadstone.build_info().version} runs on {platform.machine()}")
END
  "${emulated[@]}" "$build/site/bin/loadstone" verify c.safetensors
}

case ${1-} in
  sysroot) make_sysroot ;;
  wheel) make_wheel; run_wheel ;;
  *) report "unknown step '${1-}': expected 'sysroot' or 'wheel'" && exit 1 ;;
esac
