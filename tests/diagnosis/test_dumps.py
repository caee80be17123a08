"""`jaxcoll.dump`: what it writes, and where."""

import json
import os

import jax
import numpy as np
import pytest
from checks import mapped, mesh, native_missing

import jaxcoll
from jaxcoll.diagnosis import doctor

pytestmark = pytest.mark.skipif(native_missing() is not None, reason="there are no records")


def test_into_a_folder_that_is_made(tmp_path):
    f = jax.jit(mapped(lambda x: jaxcoll.all_reduce(x, "x"), mesh(3)))
    with jaxcoll.using(backend="native"):
        jax.block_until_ready(f(np.ones((3, 17), np.float32)))
    file = jaxcoll.dump(tmp_path / "new" / "folder")
    assert file == tmp_path / "new" / "folder" / "process_0.json"
    dump = json.loads(file.read_text())
    assert (dump["pid"], dump["process"], dump["state"]) == (os.getpid(), 0, "running")
    calls = [dict(zip(dump["calls"]["columns"], row, strict=True)) for row in dump["calls"]["rows"]]
    last = max(calls, key=lambda call: call["arrived"])
    (site,) = dump["sites"][str(last["site"])]
    assert site["operands"] == "f32[17]"
    assert (site["op"], site["axes"], site["bytes"]) == ("all_reduce sum", ["x"], 68)
    assert site["path"] == "native, in one process"
    assert "test_dumps.py" in site["source"]
    assert 0 < last["arrived"] <= last["met"] <= last["resumed"]
    assert "test_dumps.py" in dump["stack"] or any(
        "test_dumps" in s for s in dump["threads"].values()
    )
    assert doctor.report([file.parent])[0].startswith("1 process, 1 dump, ")


def test_nowhere(monkeypatch):
    monkeypatch.setenv("JAXCOLL_DUMP_DIR", "none")
    with pytest.raises(RuntimeError, match="JAXCOLL_DUMP_DIR=none"):
        jaxcoll.dump()
