"""`jaxcoll bench`, and what `auto` makes of its results."""

import json
import logging
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from checks import mapped, mesh, native_missing

import jaxcoll
from jaxcoll import _bench, _bench_matmul, _crossovers, _native
from jaxcoll._crossovers import OneCall
from jaxcoll.cli import main

needs_native = pytest.mark.skipif(native_missing() is not None, reason="needs the native extension")


@pytest.fixture
def file(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "folder" / "crossovers.json"
    monkeypatch.setenv("JAXCOLL_CROSSOVERS", str(path))
    _crossovers._measured.cache_clear()
    yield path
    _crossovers._measured.cache_clear()


@pytest.mark.full
@needs_native
def test_the_command(tmp_path: pathlib.Path):
    file = tmp_path / "crossovers.json"
    command = [
        *(sys.executable, "-m", "jaxcoll", "bench", "all_reduce", "ppermute"),
        *("--sizes", "512:4K", "--devices", "2", "--rounds", "3"),
    ]
    done = subprocess.run(
        command,
        env={"PATH": "", "JAXCOLL_CROSSOVERS": str(file), "PYTHONPATH": ":".join(sys.path)},
        check=True,
        timeout=240,
        capture_output=True,
        text=True,
    )
    _, head, *rows = done.stdout.splitlines()
    assert head.split()[:4] == ["op", "bytes", "auto", "native"]
    measured = [row.split() for row in rows if row.startswith(("all_reduce ", "ppermute "))][:4]
    assert [row[:3] for row in measured] == [
        [op, size, "native"] for op in ("all_reduce", "ppermute") for size in ("512", "2048")
    ]
    assert all(row[-1] == "0" for row in measured)
    assert rows[-1] == f"stored for auto: {file}"
    assert set(json.loads(file.read_text())["lax_from_bytes"]) == {"ppermute"}


def run(script: str) -> str:
    """Runs a script with an environment that the user might have; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={
            "PATH": "",
            "PYTHONPATH": ":".join(sys.path),
            "HOME": "/nowhere",
            "JAXCOLL_ACCELERATE_LAX": "1",
        },
        timeout=240,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


BENCH = 'main("bench ppermute --sizes 8:32 --devices 2 --rounds 3 --no-store".split())'


def test_lax_is_what_is_compared_with():
    said = run(
        f"from jaxcoll.cli import main; {BENCH}; "
        "from jaxcoll._config import accelerates_lax; print(accelerates_lax())"
    )
    assert said.endswith("False\n")


def test_without_native_calls():
    """Lax alone is measured, and the reason is said."""
    said = run(
        f"import sys; sys.modules['jaxcoll._core'] = None; from jaxcoll.cli import main; {BENCH}"
    )
    assert "no native calls, jax.lax alone: jaxcoll was installed without" in said
    row = said.splitlines()[3].split()
    assert row[:5] == ["ppermute", "8", "lax", "-", "-"]
    assert float(row[5]) > 0


@pytest.mark.parametrize(
    "variables", [{"HOME": "/proc/1/nowhere"}, {"JAXCOLL_CROSSOVERS": "/proc/nowhere/file"}]
)
def test_a_home_that_cannot_be_read_is_no_obstacle(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if "HOME" in variables:
        monkeypatch.delenv("JAXCOLL_CROSSOVERS", raising=False)
        monkeypatch.setattr(pathlib.Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no")))
    _crossovers._measured.cache_clear()
    assert _crossovers.lax_from_bytes("ppermute", 4) == 4 << 20
    _crossovers._measured.cache_clear()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["all_reduced"], 'bench: OP: expected one of "all_reduce", .* Did you mean "all_reduce"?'),
        (["--sizes", "8-64M"], "--sizes: expected a size or a range such as 8:64M, got '8-64M'"),
        (["--sizes", "64M:8"], "--sizes: expected sizes above 0 in rising order, got '64M:8'"),
        (["--devices", "two"], "argument --devices: invalid int value: 'two'"),
        (["--rounds", "0"], "--rounds: expected at least 1, got 0"),
        (["--against", "mpi"], "argument --against: invalid choice: 'mpi'"),
    ],
)
def test_bad_arguments(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["bench", *arguments])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert text.split(".*")[0] in said
    assert text.split(".*")[-1].strip() in said


def test_sizes():
    assert _bench.sizes_of("8:200") == [8, 32, 128]
    assert _bench.sizes_of("64k:1M") == [64 << 10, 256 << 10, 1 << 20]
    assert _bench.sizes_of("3M") == [3 << 20]


# ---- Crossovers ----------------------------------------------------------------------------------


def rows(op: str, *speedups: float) -> list[_bench.Row]:
    return [
        _bench.Row(op, 1000 * 4**i, "native", 1.0, 1.0, 1.0, speedup, 1.0, 1.0, 0)
        for i, speedup in enumerate(speedups)
    ]


@pytest.mark.parametrize(
    ("speedups", "expected"),
    [
        ((3.0, 2.0, 0.8, 0.7), {"ppermute": 16000}),
        ((3.0, 0.8, 1.2, 0.9, 0.9), {"ppermute": 64000}),
        ((3.0, 2.0, 1.0, 0.7), {"ppermute": None}),  # a single size may be noise
        ((3.0, 0.7, 0.7, 1.0), {"ppermute": None}),
        ((0.5,), {}),
        ((), {}),
    ],
)
def test_where_lax_is_faster(speedups: tuple[float, ...], expected: dict[str, int | None]):
    assert _bench.crossovers(rows("ppermute", *speedups)) == expected


def test_sums_never_change_their_path():
    assert _bench.crossovers(rows("all_reduce", 0.5, 0.5, 0.5)) == {}


@needs_native
def test_auto_takes_what_was_measured(file: pathlib.Path):
    def path(size: int) -> str:
        f = mapped(lambda x: jaxcoll.all_gather(x, "x", backend="auto"), mesh(2))
        (row,) = jaxcoll.explain(f, np.zeros((2, size // 4), np.float32)).rows
        return row.path

    assert path(4096) == "native"
    assert _crossovers.write({"all_gather": 2000}, 2, 10_000) == file
    assert (path(1996), path(2000), path(4096)) == ("native", "lax", "lax")
    # Another group, other ops, smaller sizes: what is known stays.
    _crossovers.write({"all_gather": None}, 4, 10_000)
    _crossovers.write({"ppermute": None}, 2, 10_000)
    _crossovers.write({"all_gather": None}, 2, 1000)
    assert path(4096) == "lax"
    _crossovers.write({"all_gather": None}, 2, 10_000)
    assert path(4096) == "native"


def matmul_rows(op: str, *ratios: float) -> list[_bench_matmul.Row]:
    return [
        _bench_matmul.Row(op, 16, 1000 * 8**i, "native", 1.0, 1.0, 1.0, ratio, 0)
        for i, ratio in enumerate(ratios)
    ]


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ((2.0, 1.5, 0.8, 0.7), OneCall(8000, 512_000)),
        ((2.0, 0.8, 1.1, 0.7, 0.7), OneCall(64_000, 4_096_000)),  # a single one may be noise
        ((2.0, 1.0, 0.98), OneCall(64_000, 0)),
        ((0.5, 0.5, 2.0), OneCall(0, 8000)),
        ((0.5,), None),
    ],
)
def test_where_two_steps_are_faster(ratios: tuple[float, ...], expected: OneCall | None):
    found = _bench_matmul.crossovers(matmul_rows("all_gather_matmul", *ratios))
    assert found == ({} if expected is None else {"all_gather_matmul": expected})


@needs_native
def test_auto_takes_the_way_that_was_measured(file: pathlib.Path):
    if _native.matmul_problem():
        pytest.skip("needs SciPy's BLAS")

    def path(side: int) -> str:
        f = mapped(lambda x, w: jaxcoll.all_gather_matmul(x, w, "x", backend="auto"), mesh(2))
        blocks = np.zeros((2, side, side), np.float32)
        (row,) = jaxcoll.explain(f, blocks, blocks).rows
        return row.path

    assert path(32) == "native"
    products = 2 * 2 * 32**3
    _crossovers.write_matmuls(
        {"all_gather_matmul": OneCall(products - 1, 0)}, 2, "one process", 1 << 30
    )
    assert (path(16), path(32)) == ("native", "two-step")
    # Of other groups, and between processes, what is known stays; of copies, too.
    _crossovers.write_matmuls({"all_gather_matmul": OneCall(0, 0)}, 2, "several processes", 1 << 30)
    _crossovers.write({"all_gather": 2000}, 2, 10_000)
    assert path(16) == "native"
    assert _crossovers.one_call_to_products("all_gather_matmul", 2, "several processes") == 0
    assert _crossovers.one_call_to_products("all_gather_matmul", 4, "one process") == 1 << 23
    assert _crossovers.lax_from_bytes("all_gather", 2) == 2000
    # Beside a w of as many elements as the largest of the square blocks that one call served.
    assert _crossovers.one_call_to_w("all_gather_matmul", 4, "one process", 4096) == 1 << 18
    _crossovers.write_matmuls(
        {"matmul_reduce_scatter": OneCall(4 * 1024**3, 0)}, 2, "one process", 1 << 40
    )
    of = ("matmul_reduce_scatter", 2, "one process")
    assert _crossovers.one_call_to_w(*of, 1024) == 1024**2
    assert _crossovers.one_call_to_w(*of, 1023) == 1 << 18
    _crossovers.write_matmuls(
        {"matmul_reduce_scatter": OneCall(64 * 1024**3, 0)}, 8, "one process", 1 << 40
    )
    assert _crossovers.one_call_to_w("matmul_reduce_scatter", 4, "one process", 1024) == 1024**2
    # All that was measured was best in one call: of more, what is known stays.
    most = products - 1
    _crossovers.write_matmuls({"all_gather_matmul": OneCall(1000, 0)}, 2, "one process", 1000)
    assert _crossovers.one_call_to_products("all_gather_matmul", 2, "one process") == most
    # So it does of where two steps were faster.
    lost_at, of = 4 * 600**3, ("all_gather_matmul", 2, "one process")
    _crossovers.write_matmuls({"all_gather_matmul": OneCall(0, lost_at)}, 2, "one process", 1 << 30)
    _crossovers.write_matmuls({"all_gather_matmul": OneCall(9, 0)}, 2, "one process", lost_at - 1)
    assert _crossovers.two_steps_won_at(*of) == 600
    _crossovers.write_matmuls({"all_gather_matmul": OneCall(9, 0)}, 2, "one process", lost_at)
    assert _crossovers.two_steps_won_at(*of) == 0


@needs_native
def test_the_command_with_matmuls(file: pathlib.Path):
    command = ["bench", "matmul_reduce_scatter", "--sizes", "1K:4K", "--devices", "2"]
    said = run(
        f"import os; os.environ['JAXCOLL_CROSSOVERS'] = {str(file)!r}; "
        f"from jaxcoll.cli import main; raise SystemExit(main({[*command, '--rounds', '3']}))"
    )
    lines = said.splitlines()
    if "collective matmuls are not measured" in said:
        pytest.skip("needs SciPy's BLAS")
    assert lines[0].startswith("2 ranks in one process, f32")
    measured = [line.split() for line in lines[2:4]]
    assert [row[:2] for row in measured] == [["matmul_reduce_scatter", s] for s in ("16", "32")]
    assert all(row[-1] == "0" for row in measured)
    assert lines[-1] == f"stored for auto: {file}"
    stored = json.loads(file.read_text())["one_call"]["one process"]
    assert set(stored) == {"matmul_reduce_scatter"}


def test_lax_is_never_faster(file: pathlib.Path):
    del file
    _crossovers.write({"ppermute": None}, 4, 1 << 20)
    assert _crossovers.lax_from_bytes("ppermute", 4) == 4 << 20  # as shipped: not measured
    _crossovers.write({"ppermute": None}, 4, 16 << 20)
    assert _crossovers.lax_from_bytes("ppermute", 4) is None


def test_groups_that_were_not_measured(file: pathlib.Path):
    del file
    assert _crossovers.lax_from_bytes("ppermute", 4) == 4 << 20  # as shipped
    _crossovers.write({"ppermute": 1000}, 4, 8000)
    assert _crossovers.lax_from_bytes("ppermute", 4) == 1000
    assert _crossovers.lax_from_bytes("ppermute", 3) == 1000
    assert _crossovers.lax_from_bytes("ppermute", 8) == 4 << 20
    assert _crossovers.lax_from_bytes("all_gather", 4) is None


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"machine": 1, "lax_from_bytes": 3}'])
def test_a_file_that_makes_no_sense(
    file: pathlib.Path, content: str, caplog: pytest.LogCaptureFixture
):
    file.parent.mkdir()
    file.write_text(content)
    with caplog.at_level(logging.WARNING, "jaxcoll"):
        assert _crossovers.lax_from_bytes("ppermute", 4) == 4 << 20
    if "machine" not in content:
        assert f"{file} can't be read" in caplog.text


def test_another_machines_file(file: pathlib.Path):
    _crossovers.write({"ppermute": 1000}, 4, 8000)
    content = json.loads(file.read_text())
    content["machine"]["node"] = "elsewhere"
    file.write_text(json.dumps(content))
    _crossovers._measured.cache_clear()
    assert _crossovers.lax_from_bytes("ppermute", 4) == 4 << 20


def test_no_command(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert "required: COMMAND" in capsys.readouterr().err
