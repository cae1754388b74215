#!/usr/bin/env bash
# Build wheel and sdist into a folder, check their metadata and the conda recipe, and take the first
# steps with each of them in a bare environment: packaging/check.sh [FOLDER]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD

temporary=$(mktemp -d)
trap 'rm -rf "$temporary"' EXIT
folder=${1:-$temporary/dist}
python=${PYTHON:-python3}

"$python" -m venv "$temporary/tools"
"$temporary/tools/bin/python" -m pip install --quiet build twine py-rattler-build
"$temporary/tools/bin/python" -m build --outdir "$folder" . >"$temporary/log" ||
    { cat "$temporary/log" && exit 1; }
"$temporary/tools/bin/twine" check --strict "$folder"/*

"$temporary/tools/bin/python" packaging/check_recipe.py

for package in "$folder"/*; do
    "$python" -m venv --clear "$temporary/bare"
    "$temporary/bare/bin/python" -m pip install --quiet "$package"
    "$temporary/bare/bin/python" -m pip check
    (cd "$temporary" && bare/bin/python "$root/packaging/first_step.py")
    "$temporary/bare/bin/fastopt" --version
done
