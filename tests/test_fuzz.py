"""No damaged checkpoint costs memory, a signal, a foreign error or half a change.

The long attack is in the profile nightly, with ``FUZZ_CASES`` (default 20000) and
``FUZZ_SEED`` for the first of them.
"""

import os

import pytest

from helpers.fuzzing import attack

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals and limits")


def check(first, count, every):
    outcomes, findings = attack(first, count, every)
    print(f"{sum(outcomes.values())} cases from seed {first}, {dict(outcomes)}")
    assert not findings, "\n".join(f"{len(findings)} findings: {findings[:20]}".split("), ("))
    assert outcomes["signals"] == 0
    assert sum(outcomes.values()) == count


@pytest.mark.slow
def test_a_short_attack_finds_nothing():
    check(0, 60, every=False)


@pytest.mark.slow("nightly")
def test_a_long_attack_finds_nothing():
    count, seed = (
        int(os.environ.get(f"FUZZ_{name}", default))
        for name, default in (("CASES", 20_000), ("SEED", 1_000_000))
    )
    check(seed, count, every=True)
