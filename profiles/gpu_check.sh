#!/usr/bin/env bash
# All tests that need a GPU, in one call, on a machine with one SM90 GPU. Prints pytest's closing line.
set -euo pipefail
cd "$(dirname "$0")/.."
python3 -c 'import torch; print(torch.__version__, torch.cuda.get_device_name())'
PYTHONPATH="$PWD" python3 -m pytest -m gpu -rs $(grep -lr --include='test_*.py' 'pytest.mark.gpu' tests) "$@"
