#!/usr/bin/env bash
# Tests with the Python of a Debian release (trixie 3.13, sid 3.14), and with the newest or the
# oldest versions of numba and NumPy that pyproject.toml admits for that Python:
#
#     tests/platforms/python.sh sid                          # the default tests
#     tests/platforms/python.sh trixie oldest tests/engine   # arguments of pytest
#
# It needs root, debootstrap and a network. A root of 1 GB stays in FASTOPT_ROOTS.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

release=${1:?"the name of a Debian release, such as sid"}
versions=${2:-newest}
shift $(($# < 2 ? $# : 2))
root=${FASTOPT_ROOTS:-/var/tmp/fastopt-roots}/$release
venv=/venv/$versions

if [[ ! -e $root/complete ]]; then
    debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates,gcc,libc6-dev \
        "$release" "$root"
    touch "$root/complete"
fi
# The certificates of this machine: it may reach its package index through a proxy of its own.
cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
cp /etc/resolv.conf /etc/hosts "$root/etc/"

inside() {
    unshare --mount bash -euo pipefail -c '
        root=$1 && shift
        mount -t proc proc "$root/proc"
        mount --rbind /dev "$root/dev"
        exec chroot "$root" /usr/bin/env -i PATH=/usr/bin:/usr/sbin:/bin HOME=/root LANG=C.UTF-8 \
            PIP_CERT=/etc/ssl/certs/ca-certificates.crt SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt \
            PIP_DISABLE_PIP_VERSION_CHECK=1 bash -euo pipefail -c "$@"
    ' inside "$root" "$@"
}

rm -rf "$root/fastopt"
mkdir "$root/fastopt"
git ls-files -z --cached --others --exclude-standard |
    tar --null --files-from=- --create | tar --extract --directory "$root/fastopt"

inside "
    cd /fastopt
    [[ -x $venv/bin/python ]] || python3 -m venv $venv
    $venv/bin/python -m pip install --quiet uv
    : >constraints.txt
    if [[ $versions == oldest ]]; then
        $venv/bin/uv pip compile --quiet --resolution lowest-direct --only-binary :all: \
            --python $venv/bin/python --output-file constraints.txt pyproject.toml
    fi
    $venv/bin/python -m pip install --quiet --prefer-binary --constraint constraints.txt -e '.[test]'
    $venv/bin/python -m fastopt info
    $venv/bin/python -m pytest \"\$@\"
" pytest "$@"
