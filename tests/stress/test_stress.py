"""The short form of the stress test: every scenario once, on some numbers of devices."""

import functools as ft

import pytest
from checks import auto_is_native
from stress.run import DEVICES, Outcome, run_scenarios
from stress.scenarios import SCENARIOS

# A machine that runs other things as well is several times slower; a hang takes for ever.
_LIMIT_S = 90.0
_HARD_LIMIT_S = 270.0


on_devices = pytest.mark.parametrize(
    "devices",
    [pytest.param(n, marks=pytest.mark.full if n == 8 else pytest.mark.long) for n in DEVICES],
)
needs_engine = pytest.mark.skipif(not auto_is_native(), reason="a test of the native engine")


@ft.cache
def outcome(devices: int) -> Outcome:
    """Run all scenarios in one process, once for all tests."""
    return run_scenarios(
        list(SCENARIOS),
        devices=devices,
        seed=devices,
        rounds=1,
        limit_s=_LIMIT_S,
        hard_limit_s=_HARD_LIMIT_S,
    )


@needs_engine
@pytest.mark.parametrize("name", SCENARIOS)
@on_devices
def test_scenario(devices: int, name: str):
    problem = outcome(devices).problem(name)
    assert problem is None, problem


@needs_engine
@on_devices
def test_the_process_ends(devices: int):
    """In the midst of steps that nobody waits for; scenarios report their own failures."""
    assert outcome(devices).exit_code in (0, 1), outcome(devices).output
