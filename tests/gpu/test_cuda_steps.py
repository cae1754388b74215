"""Steps on a device are those of the CPU: the table of ``tests/ptx/steps.py``."""

import pytest

pytest.importorskip("ml_dtypes")

from helpers.device_arrays import check_close
from ptx.steps import CASES, stepped

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:b?float16 weights without masters"),
]
FORMS = [family for family in CASES if family.startswith(("every optimizer", "other forms"))]
OWN = ("counts", "every", "other", "float64", "graphs", "streams")
FAMILIES = [family for family in CASES if not family.startswith(OWN)]


def cases(families):
    """Cases without streams that only a driver without a device knows."""
    found = [f"{each}/{name}" for each in families for name in CASES[each] if name != "streams"]
    return pytest.mark.parametrize("case", found)


def check(case):
    family, _, name = case.partition("/")
    for device, expected in stepped(name, *CASES[family][name]):
        check_close(device, expected, rtol=1e-5, atol=5e-6)


@cases(FAMILIES)
def test_steps_are_those_of_the_cpu(case):
    check(case)


@cases([*FORMS, "every rule, standard rows"])
def test_every_rule_steps_as_on_the_cpu(case):
    check(case)
