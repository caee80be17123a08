"""What `jaxcoll top` shows of this process."""

import os

import jax
import numpy as np
import pytest
from checks import mapped, mesh, native_missing

import jaxcoll
from jaxcoll import cli
from jaxcoll.diagnosis import black_box, top

needs_engine = pytest.mark.skipif(native_missing() is not None, reason="there is nothing to see")


def seen(at_s: float, arrived_s: np.ndarray, first: int, seconds: float) -> top.Look:
    """What a device's ring shows that made calls of 1,000 bytes."""
    calls = np.zeros(len(arrived_s), black_box.CALL)
    calls["sequence"] = first + np.arange(len(arrived_s))
    calls["site"], calls["arrived"] = 7, arrived_s * 1e9
    calls["resumed"] = (arrived_s + seconds) * 1e9
    about = {"process": 0, "phase": "in Python"}
    return top.Look(about, calls, {7: [{"text": "all_reduce", "bytes": 1000}]}, round(at_s * 1e9))


@pytest.mark.parametrize("kept", [10_000, 4096])
def test_rates_where_the_ring_holds_all_that_was_between_or_less(kept):
    """10,000 calls in 2 s, each of 50 us."""
    before = seen(10.0, np.array([9.0]), 1, 5e-5)
    arrived_s = 10 + np.arange(10_000) * 2e-4
    now = seen(12.0, arrived_s[-kept:], 2 + 10_000 - kept, 5e-5)
    (row,) = top.rows({os.getpid(): before}, {os.getpid(): now})
    cells = dict(zip(top.COLUMNS, row, strict=True))
    assert (cells["calls/s"], cells["MB/s"], cells["in calls"]) == ("5,000", "5.0", "25%")


@needs_engine
def test_this_process(capsys):
    f = jax.jit(mapped(lambda x: jaxcoll.all_reduce(x, "x"), mesh(3)))
    assert black_box.own() is not None
    (box,) = top.find(str(os.getpid())).values()
    before = {1: top.look(box)}
    with jaxcoll.using(backend="native"):
        for _ in range(10):
            jax.block_until_ready(f(np.ones((3, 1000), np.float32)))
    cells = [
        dict(zip(top.COLUMNS, row, strict=True)) for row in top.rows(before, {1: top.look(box)})
    ]
    own = {row["device"]: row for row in cells if row["device"] in "012"}
    assert set(own) == {"0", "1", "2"}
    for row in own.values():
        assert row["call"] == "none"
        assert float(row["calls/s"].replace(",", "")) > 0
        assert float(row["MB/s"].replace(",", "")) > 0
    assert cli.main(["top", str(os.getpid()), "--seconds", "0.05", "--times", "1"]) == 0
    assert str(os.getpid()) in capsys.readouterr().out


@pytest.mark.parametrize("target", ["999999999", "no-such-job"])
def test_nothing_to_look_at(target, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["top", target, "--times", "1"])
    assert ended.value.code == 2
    assert "expected the pid of a process that uses jaxcoll" in capsys.readouterr().err


def test_the_time_between_looks_is_positive(capsys):
    with pytest.raises(SystemExit):
        cli.main(["top", "1", "--seconds", "0"])
    assert "--seconds: expected a positive number" in capsys.readouterr().err
