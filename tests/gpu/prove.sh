#!/usr/bin/env bash
# Proof on a machine with an NVIDIA GPU, without a network and in under 8 minutes: the tests on the
# device, a memory check of some of them, and a table of measurements. It needs numba-cuda, pytest,
# hypothesis and ml_dtypes; pytest-xdist, torch, CuPy and compute-sanitizer are used if installed.
#
#     bash tests/gpu/prove.sh [FILE]        # the report, in Markdown; default gpu_report.md
#
# PYTHON names another interpreter than python3.
set -uo pipefail
report=$(realpath "${1:-gpu_report.md}")
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
unset NUMBA_ENABLE_CUDASIM PYTEST_ADDOPTS

find_gpu='
import sys
from fastopt._kernels.devices import cuda_target
try:
    cuda_target()
except ImportError as error:
    sys.exit(f"{error}")
'
if ! reason=$("$python" -c "$find_gpu" 2>&1); then
    echo "prove.sh: nothing was proven, as no GPU can be used: ${reason##*$'\n'}" >&2
    exit 1
fi

failed=0
# check TITLE SECONDS COMMAND...: run a command, and add its last lines to the report.
check() {
    local title=$1 limit=$2 status lines
    shift 2
    echo "== $title"
    timeout --kill-after=5 "$limit" "$@" 2>&1 | tee "$output"
    status=${PIPESTATUS[0]}
    case $status in
        0) lines=ok ;;
        124 | 137) lines="stopped after $limit s" ;;
        *) lines="failed with exit status $status" ;;
    esac
    [[ $status -eq 0 ]] || failed=1
    printf '\n## %s\n\n%s\n\n```\n%s\n```\n' "$title" "$lines" "$(tail -n 5 "$output")" >>"$report"
}

output=$(mktemp)
trap 'rm -f "$output"' EXIT
{
    echo "# fastopt on a GPU"
    echo
    "$python" -m fastopt info
} >"$report"

many=()
"$python" -c 'import xdist' 2>/dev/null && many=(-n "$(($(nproc) < 16 ? $(nproc) : 16))")
check "Tests" 240 "$python" -m pytest -q -p no:cacheprovider -m gpu "${many[@]}" tests/gpu
if command -v compute-sanitizer >/dev/null; then
    check "Memory check" 80 compute-sanitizer --tool memcheck --error-exitcode 3 \
        "$python" -m pytest -q -p no:cacheprovider -m gpu tests/gpu/test_cuda_updater.py \
        -k "interface or moves or state_is_made"
else
    printf '\n## Memory check\n\ncompute-sanitizer is not installed\n' >>"$report"
fi
echo "== Measurements"
printf '\n## Measurements\n\n' >>"$report"
if ! timeout --kill-after=5 140 "$python" asv_benchmarks/gpu.py | tee -a "$report"; then
    failed=1
    printf '\nstopped or failed\n' >>"$report"
fi
echo "report: $report"
exit "$failed"
