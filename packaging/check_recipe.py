"""Check the conda recipe: rattler-build reads it, and it says what pyproject.toml says."""

import re
import tomllib
from pathlib import Path

from rattler_build import Stage0Recipe

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
VERSION = re.search(r'^__version__ = "(.*)"$', (ROOT / "fastopt" / "__init__.py").read_text(), re.M)

# The parser refuses unknown fields, licenses and version specifications.
(variant,) = Stage0Recipe.from_file(ROOT / "packaging" / "conda" / "recipe.yaml").render()
recipe = variant.recipe.to_dict()

dependencies = [each.partition(";")[0] for each in PROJECT["dependencies"]]
expected = {
    "version": VERSION[1],
    "license": PROJECT["license"],
    "summary": PROJECT["description"],
    "run": sorted([f"python{PROJECT['requires-python']}", *dependencies]),
    "scripts": [" = ".join(script) for script in PROJECT["scripts"].items()],
}
found = {
    "version": recipe["package"]["version"],
    "license": recipe["about"]["license"],
    "summary": recipe["about"]["summary"],
    "run": sorted(each.replace(" ", "") for each in recipe["requirements"]["run"]),
    "scripts": recipe["build"]["python"]["entry_points"],
}
for name, value in expected.items():
    assert found[name] == value, f"{name} is {found[name]}, pyproject.toml has {value}"
print(f"conda recipe of fastopt {VERSION[1]}: as pyproject.toml")
