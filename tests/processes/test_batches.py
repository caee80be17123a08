"""Batches of several processes: shares, what is refused, and the loaders that make them."""

import importlib.util
import re

import pytest
from checks import native_missing
from processes.run_job import run_job

needs_native = pytest.mark.skipif(
    native_missing() is not None, reason="the engine across processes is native"
)
BACKENDS = [pytest.param("auto", marks=needs_native), "lax"]


@pytest.mark.parametrize(
    ("processes", "devices"),
    [(2, 2), *(pytest.param(n, 1, marks=pytest.mark.full) for n in (2, 4))],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_shares(processes: int, devices: int, backend: str):
    lines = run_job(
        "batches.py", "placing", processes=processes, devices=devices, JAXCOLL_BACKEND=backend
    )
    for said in lines.values():
        assert "all batches are right" in said


# Case -> what its text says, with three processes of two devices.
REFUSED = {
    "uneven": r"shard_batch: \['y'\]\['z'\]: process 0 has float32\[8,2\]; process 1 has "
    r"float32\[10,2\]; process 2 has float32\[12,2\]\. All processes must .*: drop or pad",
    "uneven whole": r"shard_batch: \['x'\]: process 0 has float32\[8,2\]; process 1 has ",
    "missing": r"shard_batch: \['y'\]: process 0, 1 has float32\[8,2\]; process 2 has nothing\. ",
    "more": r"shard_batch: \['y'\]: process 0, 1 has nothing; process 2 has float32\[8,2\]\. ",
    "dtype": r"shard_batch: \['x'\]: process 0, 1 has float32\[8,2\]; process 2 has int32\[8,2\]",
    "not an array": r"shard_batch: \['x'\]: process 0, 1 has float32\[8,2\]; process 2 has str\[\]",
    "whole": r"shard_batch: what is given: process 0, 1 has a share; process 2 has the whole",
    "spec": r"shard_batch: the sharding: process 0, 1 has .*'data'.*; process 2 has .*'tensor'",
    "function": r"\w+: the call: process 0, 1 has shard_batch; process 2 has distribute_batch",
    "scalar": r"shard_batch_dim: \['n'\]: process 0 has int32\[\] of value 0; process 1 has ",
    "axis": r"shard_batch_dim: batch_axis: process 0, 1 has 0; process 2 has 1",
    "values": r"replicate_across_devices: \['v'\]: process 0, 1 has float32\[8,2\] with contents ",
    "divisible": r"shard_batch: \['x'\]: dimension 0 of shape \(9,\) can't be split over 6 devices "
    r"\(data\)\. Make it a multiple of 6: this process's share has shape \(3,\)",
    "divisible whole": r"shard_batch: \['x'\]: dimension 0 of shape \(7,\) can't be split over 6 ",
    "rank": r"shard_batch: \['x'\]: .* has an entry for dimension 0, but the leaf has shape \(\)",
    "lame": r"shard_batch: \['x'\]: dimension 0 has no even shares: .*batch_is_global=True",
    "iterator": r"prefetch_to_device: the iterator: process 0, 1 has a next tree; process 2 has "
    "ended",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend",
    [pytest.param("auto", marks=needs_native), pytest.param("lax", marks=pytest.mark.full)],
)
def test_what_does_not_fit_together_is_refused_by_all(backend: str):
    lines = run_job("batches.py", "refusing", processes=3, devices=2, JAXCOLL_BACKEND=backend)
    texts = [dict(line.split(": ", 1) for line in said if ": " in line) for said in lines.values()]
    for case, pattern in REFUSED.items():
        for text in texts:
            assert re.match(pattern, text[case]), (case, text[case])
        assert case == "function" or len({text[case] for text in texts}) == 1
    for said in lines.values():
        assert "all are refused" in said


@needs_native
@pytest.mark.full
@pytest.mark.parametrize("devices", [2, 1])
def test_a_process_without_a_next_batch(devices: int):
    lines = run_job("batches.py", "leaving", processes=2, devices=devices, expect=None)
    (said,) = [line for line in lines[0] if line.startswith("left: ")]
    assert re.match(r"left: shard_batch: the processes could not compare: .*process 1", said), said


@pytest.mark.full
@pytest.mark.parametrize("devices", [2, 1])
@pytest.mark.parametrize("loader", ["numpy", "grain", "datasets"])
def test_loaders_of_shares(loader: str, devices: int, tmp_path):
    if importlib.util.find_spec(loader) is None:
        pytest.skip(f"{loader} is not installed (pip install --group data)")
    lines = run_job(
        "batches.py",
        loader,
        processes=2,
        devices=devices,
        HF_HOME=str(tmp_path),
        HF_HUB_OFFLINE="1",
    )
    for said in lines.values():
        assert "all items were seen" in said
