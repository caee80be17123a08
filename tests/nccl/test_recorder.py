"""Calls on GPUs in the flight recorder: in dumps, in the timeline, in what doctor says."""

import json
import pathlib
import time
from collections.abc import Callable

import jax
import numpy as np
import pytest
from checks import auto_is_native, mesh

import jaxcoll
from jaxcoll import _native
from jaxcoll.diagnosis import black_box, doctor, records, timeline

pytestmark = pytest.mark.skipif(not auto_is_native(), reason="about native calls")


def test_calls_stand_in_dumps(gpus: Callable[[], str], tmp_path: pathlib.Path):
    del gpus
    f = jax.jit(
        jax.shard_map(
            lambda x: jaxcoll.all_reduce(x, "x", op="max"), mesh=mesh(3), in_specs=jax.P("x"),
            out_specs=jax.P(),
        )
    )  # fmt: skip
    xs = np.arange(36, dtype=np.float32).reshape(12, 3)
    before = _native.num_calls()
    for _ in range(2):
        jax.block_until_ready(f(xs))
    assert _native.num_calls() == before + 6
    _await_ends()
    path = jaxcoll.dump(tmp_path)
    dumps = records.read([path])
    calls = [call for call in dumps.calls if "f32[4,3]" in dumps.site(call.site)["text"]]
    assert len(calls) == 6
    assert all(call.arrived <= call.moved <= call.resumed for call in calls)
    met: dict[tuple[int, ...], set[tuple[int, int]]] = {}
    for call in calls:
        met.setdefault(call.key, set()).add((call.rank, call.place.device))
    assert list(met.values()) == [{(0, 0), (1, 1), (2, 2)}] * 2
    assert {call.occurrence for call in calls} == {1, 2}
    site = dumps.site(calls[0].site)
    assert (site["path"], site["op"]) == (records.OVER_NCCL, "all_reduce max")
    # When a device came is not known, so nobody is a straggler. Of these calls alone: the process
    # has made others, on CPU devices.
    dump = json.loads(pathlib.Path(path).read_text())
    at = dump["calls"]["columns"].index("site")
    sites = {call.site for call in calls}
    dump["calls"]["rows"] = [row for row in dump["calls"]["rows"] if row[at] in sites]
    alone = tmp_path / "process_alone.json"
    alone.write_text(json.dumps(dump))
    assert len(records.read([alone]).calls) == 6
    assert doctor.report([alone])[1] == 0
    names = [event["name"] for event in timeline.events(dumps) if event.get("cat") == "call"]
    assert names.count("all_reduce max") >= 6


def _await_ends() -> None:
    """The watch sees ends a moment later."""
    box = black_box.own()
    assert box is not None
    until = time.monotonic() + 10
    while (box.calls()["resumed"] == 0).any() and time.monotonic() < until:
        time.sleep(0.02)
