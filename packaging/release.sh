#!/usr/bin/env bash
# All steps of a release up to the upload, which it leaves to a person:
#
# 1. Set __version__ in fastopt/__init__.py, `version` and `date-released` in CITATION.cff, and the
#    title of the version in CHANGELOG.md. Commit.
# 2. .ci/run exhaustive
# 3. git tag v0.1.0
# 4. packaging/release.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

refuse() {
    echo "packaging/release.sh: $1" >&2
    exit 1
}

version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' fastopt/__init__.py)
[[ -n $version ]] || refuse "fastopt/__init__.py has no __version__"
grep -q "^version: $version$" CITATION.cff || refuse "CITATION.cff has another version than $version"
grep -q "^date-released: " CITATION.cff || refuse "CITATION.cff has no date-released"
grep -q "^## \[$version\] - [0-9-]*$" CHANGELOG.md || refuse "CHANGELOG.md has no ## [$version] - DATE"
[[ -z $(git status --porcelain) ]] || refuse "there are changes that are not committed"
[[ $(git describe --exact-match --tags HEAD 2>/dev/null) == "v$version" ]] ||
    refuse "HEAD is not tagged v$version"
! grep -q "example\.org" pyproject.toml ||
    refuse "pyproject.toml has no addresses yet: set source and documentation"

rm -rf dist
packaging/check.sh dist
(cd dist && sha256sum -- *)
cat <<TEXT

Both packages of $version are checked. What is left to you:

    git push origin v$version
    python -m twine upload dist/*
    # then the checksum of the sdist into packaging/conda/recipe.yaml
TEXT
