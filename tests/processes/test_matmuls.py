"""Collective matmuls across processes."""

import pytest
from checks import native_missing
from processes.run_job import run_job

pytestmark = pytest.mark.skipif(
    native_missing() is not None, reason="the engine across processes is native"
)


@pytest.mark.parametrize(
    ("processes", "devices", "segment"),
    [
        (2, 2, "1M"),
        pytest.param(3, 1, "1M", marks=pytest.mark.full),
        pytest.param(2, 1, "", marks=pytest.mark.long),
        pytest.param(4, 1, "", marks=pytest.mark.full),
    ],
)
def test_every_kind_has_numpys_values(processes: int, devices: int, segment: str):
    lines = run_job(
        "products.py", processes=processes, devices=devices, JAXCOLL_SEGMENT_BYTES=segment
    )
    for said in lines.values():
        assert "all products are right" in said, said
