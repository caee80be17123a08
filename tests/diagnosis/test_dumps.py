"""`jaxcoll.dump`: what it writes, and where."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from checks import mapped, mesh, native_missing

import jaxcoll
from jaxcoll import _native
from jaxcoll.diagnosis import black_box, doctor

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
    assert (site["parameters"], site["path"]) == ("op=sum", "native, in one process")
    assert "test_dumps.py" in site["source"]
    assert 0 < last["arrived"] <= last["met"] <= last["resumed"]
    assert "test_dumps.py" in dump["stack"] or any(
        "test_dumps" in s for s in dump["threads"].values()
    )
    assert doctor.report([file.parent])[0].startswith("1 process, 1 dump, ")


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("pass", ""),
        ("{}['x']", "KeyError: 'x', at {file}:9 (main)"),
        ("raise Mute", "Mute"),
    ],
)
def test_what_a_process_leaves_that_ends(end, said, tmp_path):
    """Read by a hook that Python calls after all others."""
    file = tmp_path / "script.py"
    file.write_text(f"""import atexit
def last():
    box = black_box.own()
    print([box.about()["phase"], box.stack()[0]])
atexit.register(last)
from jaxcoll.diagnosis import black_box, watcher
watcher.start()
def main():
    {end}
class Mute(Exception):
    def __str__(self):
        raise ValueError
main()
""")
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{['ended', said.format(file=file)]}\n", done.stderr


def test_what_ends_a_process_is_told_while_it_is_there():
    script = (
        "from jaxcoll.diagnosis import black_box, watcher\n"
        "watcher.note_end(KeyError('early'))\n"  # of a process that nobody looks after
        "watcher.start()\n"
        "try:\n"
        "    {}['x']\n"
        "except KeyError as error:\n"
        "    watcher.note_end(error)\n"
        "watcher.forget_failures()\n"  # looks
        "print(black_box.own().about()['phase'], *black_box.own().stack()[0].splitlines())\n"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    said = "in Python ends with KeyError: 'x', at <string>:5 (<module>) File "
    assert done.stdout.startswith(said), done.stdout + done.stderr


def test_an_error_that_the_process_has_survived(tmp_path, monkeypatch):
    """It is the reason until another program has run."""
    add = lambda x: jaxcoll.all_reduce(x, "x", backend="native")  # noqa: E731
    f = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.cond(x.sum() > 0, add, lambda x: x, x),
            mesh=mesh(2),
            in_specs=jax.P("x"),
            out_specs=jax.P("x"),
            check_vma=False,
        )
    )
    monkeypatch.setattr(jaxcoll.config, "timeout_s", 0.3)
    with pytest.raises(RuntimeError, match=r"waited 0\.\d s"):
        jax.block_until_ready(f(np.float32([1, 0])))
    file = jaxcoll.dump(tmp_path)
    assert "waited 0." in json.loads(file.read_text())["reason"]
    assert "error: all_reduce" in doctor.report([tmp_path])[0]
    assert np.asarray(f(np.float32([1, 2]))).tolist() == [3, 3]
    assert not json.loads(jaxcoll.dump(tmp_path).read_text())["reason"]
    assert "error:" not in doctor.report([tmp_path])[0]


def test_a_step_that_is_defined_anew_has_its_latest_lines():
    """As in a notebook: the oldest drop out, and what is compiled again is the last."""
    box = black_box.own()
    assert box is not None
    for line in (1, 2, 3, 4, 5, 6, 6, 4):
        _native.describe_site(4711, f"called at line {line}", {"line": line})
    assert [known["line"] for known in box.sites()[4711]] == [3, 5, 6, 4]


def test_nowhere(monkeypatch):
    monkeypatch.setenv("JAXCOLL_DUMP_DIR", "none")
    with pytest.raises(RuntimeError, match="JAXCOLL_DUMP_DIR=none"):
        jaxcoll.dump()
