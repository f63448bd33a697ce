#!/usr/bin/env bash
# All tests that need a GPU, in one call, on a machine with one SM90 GPU. Most of the time is compilation, so the
# test files run side by side (JOBS of them, LIMIT seconds each). Prints pytest's closing line of each; the logs
# of red files whole.
# Arguments: test files, or none for all of them.
set -euo pipefail
cd "$(dirname "$0")/.."
python3 -c "import torch; print(torch.__version__, torch.cuda.get_device_name() if torch.cuda.is_available() else 'no GPU')"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" LOGS="${LOGS:-$(mktemp -d)}" OMP_NUM_THREADS=1
files=("$@")
[ ${#files[@]} -gt 0 ] || mapfile -t files < <(grep -lr --include='test_*.py' -e 'pytest.mark.gpu' -e 'import.* gpu\b' -e '^    gpu,$' tests)
check() {
  log="$LOGS/$(basename "$1" .py).log"
  started=$SECONDS
  timeout "${LIMIT:-540}" python3 -m pytest -m gpu -rs "$1" >"$log" 2>&1 && state=green || state=RED
  echo "$state $1 ($((SECONDS - started)) s): $(tail -1 "$log")"
  [ "$state" = green ]
}
export -f check
printf '%s\n' "${files[@]}" | xargs -P "${JOBS:-6}" -I{} bash -c 'check {}' && echo "all green" && exit 0
for log in "$LOGS"/*.log; do tail -1 "$log" | grep -q 'failed\|error' && { echo "== $log"; tail -60 "$log"; }; done
exit 1
