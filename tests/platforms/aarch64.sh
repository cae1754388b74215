#!/usr/bin/env bash
# Results on AArch64, emulated, are the bits of this machine's: the updates of same_bits.py.
#
#     tests/platforms/aarch64.sh [OPTIMIZER ...]
#
# It needs debootstrap, qemu-user-static, a network, and a python3 with fastopt's dependencies for
# comparison (PYTHON names another). A root of 600 MB stays in FASTOPT_ROOTS. The emulated
# compilation of a kernel takes seconds to minutes: a run of all updates takes an hour.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

root=${FASTOPT_ROOTS:-/var/tmp/fastopt-roots}/aarch64
packages=$root/packages
if [[ ! -e $root/complete ]]; then
    # The second stage would run programs of the root: unpacked packages are enough for Python.
    debootstrap --foreign --arch=arm64 --variant=minbase --include=python3,libgomp1 bookworm "$root"
    for package in "$root"/var/cache/apt/archives/*.deb; do
        dpkg-deb --extract "$package" "$root"
    done
    python3 -m pip install --quiet --target "$packages" --python-version 3.11 --only-binary :all: \
        --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 \
        --platform manylinux2014_aarch64 numba numpy
    touch "$root/complete"
fi

temporary=$(mktemp -d)
trap 'rm -rf "$temporary"' EXIT
export NUMBA_NUM_THREADS=2 PYTHONDONTWRITEBYTECODE=1
"${PYTHON:-python3}" tests/platforms/same_bits.py "$@" >"$temporary/here" &
NUMBA_CACHE_DIR=$root/cache PYTHONHOME=/usr PYTHONPATH=$packages \
    qemu-aarch64-static -L "$root" "$root/usr/bin/python3.11" \
    tests/platforms/same_bits.py "$@" | tee "$temporary/emulated"
wait
diff "$temporary/here" "$temporary/emulated" && echo "$(wc -l <"$temporary/here") equal results"
