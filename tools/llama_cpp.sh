#!/usr/bin/env bash
# Builds llama.cpp from the source package of llama-cpp-python, and runs the tests that compare with
# it: tools/llama_cpp.sh FOLDER [PYTEST OPTION...]. A second run finds the build done.
set -euo pipefail
cd "$(dirname "$0")/.."
folder="$(mkdir -p "${1:?usage: tools/llama_cpp.sh FOLDER [PYTEST OPTION...]}" && cd "$1" && pwd)"
shift
version=0.3.36
package="$folder/llama_cpp_python-$version"
if [ ! -d "$package" ]; then
  python -m pip download -q --no-deps --no-binary :all: --no-build-isolation --dest "$folder" \
    "llama-cpp-python==$version"
  rm -rf "$folder/unpacked"
  mkdir "$folder/unpacked"
  tar xf "$package.tar.gz" -C "$folder/unpacked"
  mv "$folder/unpacked/llama_cpp_python-$version" "$package"
fi
# Modules that the converter and llama-cpp-python import; .venv stays without them.
if [ ! -d "$folder/python" ]; then
  python -m pip install -q --no-deps --target "$folder/python.new" sentencepiece diskcache
  ln -s "$package/llama_cpp" "$folder/python.new/llama_cpp"
  mv "$folder/python.new" "$folder/python"
fi
# Compilers may fuse multiply-adds, which changes bytes. -O1 halves the time for C++.
cmake -S "$package/vendor/llama.cpp" -B "$folder/build" -G Ninja -DCMAKE_BUILD_TYPE= \
  -DCMAKE_C_FLAGS="-O2 -ffp-contract=off" -DCMAKE_CXX_FLAGS="-O1 -ffp-contract=off" \
  -DGGML_NATIVE=OFF -DGGML_OPENMP=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF \
  -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF >"$folder/cmake.log"
nice cmake --build "$folder/build" --target llama-quantize --parallel "${JOBS:-2}"
export LOADSTONE_LLAMA_CPP="$package" LOADSTONE_LLAMA_QUANTIZE="$folder/build/bin/llama-quantize"
export LLAMA_CPP_LIB_PATH="$folder/build/bin" PYTHONPATH="$folder/python${PYTHONPATH:+:$PYTHONPATH}"
python -m pytest -q "$@" -m 'not sweep and not bench' python/tests/adapters/llama_cpp \
  python/tests/convert/test_gguf_encoders.py python/tests/convert/test_gguf_imatrix.py
