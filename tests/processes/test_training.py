"""The parallel layers across processes, each compared with training on one device."""

import pytest
from checks import native_missing
from processes.run_job import run_job


@pytest.mark.skipif(native_missing() is not None, reason="the engine across processes is native")
@pytest.mark.parametrize(
    ("processes", "devices"),
    [
        pytest.param(2, 2, marks=pytest.mark.full),
        pytest.param(4, 1, marks=pytest.mark.long),
    ],
)
def test_every_family(processes: int, devices: int):
    lines = run_job("families.py", processes=processes, devices=devices, limit_s=280)
    for said in lines.values():
        assert "all families are right" in said, said


def test_first_values():
    for said in run_job("first_values.py", processes=2, devices=2).values():
        refused, last = said[-2:]
        assert refused.startswith(
            "create_train_state: model: it brings along float32[8, 8] with parts in other "
            "processes, on 4 devices that are not the mesh's 2."
        )
        assert last == "all first values are right"


@pytest.mark.long
@pytest.mark.skipif(native_missing() is not None, reason="the engine across processes is native")
def test_products_of_three_axes():
    for said in run_job("triples.py", processes=4, devices=2, limit_s=280).values():
        assert "all triples are right" in said, said


@pytest.mark.long
def test_every_family_on_lax():
    lines = run_job("families.py", processes=2, devices=2, limit_s=280, JAXCOLL_BACKEND="lax")
    for said in lines.values():
        assert "all families are right" in said, said
