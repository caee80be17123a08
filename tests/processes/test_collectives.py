"""Every op across processes: values, sizes, drawn programs, hosts, and the slower path."""

import pytest
from checks import native_missing
from processes.run_job import run_job

needs_native = pytest.mark.skipif(
    native_missing() is not None, reason="the engine across processes is native"
)
full, long = pytest.mark.full, pytest.mark.long
LAYOUTS = [(2, 2), (3, 1), (2, 1), (4, 1), (2, 4), (8, 1)]  # processes, devices of each


def assert_all(lines: dict[int, list[str]], text: str) -> None:
    for rank, said in lines.items():
        assert text in said, (rank, said)


@needs_native
@pytest.mark.parametrize(
    ("processes", "devices"),
    [LAYOUTS[0], *(pytest.param(*layout, marks=full) for layout in LAYOUTS[1:])],
)
def test_every_op_has_numpys_values(processes: int, devices: int):
    lines = run_job("values.py", "all", processes=processes, devices=devices)
    assert_all(lines, "all values are right")


@needs_native
def test_one_op_of_each_kind():
    """Where each process has one device; with --full the test above has all ops there, too."""
    lines = run_job("values.py", "some", processes=3)
    assert_all(lines, "all values are right")


@needs_native
@pytest.mark.parametrize(
    ("processes", "devices"),
    [(2, 2), pytest.param(2, 1, marks=full), pytest.param(4, 1, marks=full)],
)
def test_sums_are_added_in_rank_order(processes: int, devices: int):
    lines = run_job("rank_order.py", processes=processes, devices=devices)
    assert_all(lines, "all sums are in rank order")


@needs_native
@full
def test_sums_over_two_hosts_are_added_on_each_first():
    lines = run_job("rank_order.py", "hosts", processes=4)
    assert_all(lines, "all sums are in rank order")


@needs_native
@full
@pytest.mark.parametrize(("processes", "devices"), [(4, 1), pytest.param(4, 2, marks=long)])
def test_groups_of_some_processes(processes: int, devices: int):
    lines = run_job("values.py", "some", "parts", processes=processes, devices=devices)
    assert_all(lines, "all values are right")


@needs_native
@pytest.mark.parametrize(
    ("segment", "processes", "devices"),
    [
        pytest.param("1M", 2, 2, marks=full),
        pytest.param("", 3, 1, marks=full),
        *(
            pytest.param(segment, *layout, marks=long)
            for segment, layouts in (("1M", LAYOUTS[1:4]), ("", (LAYOUTS[0], *LAYOUTS[2:4])))
            for layout in layouts
        ),
    ],
)
def test_sizes_around_windows(processes: int, devices: int, segment: str):
    lines = run_job("sizes.py", processes=processes, devices=devices, JAXCOLL_SEGMENT_BYTES=segment)
    assert_all(lines, "all sizes are right")


@needs_native
@pytest.mark.parametrize(
    ("processes", "devices", "first", "programs"),
    [
        pytest.param(2, 2, 0, 8),
        pytest.param(2, 2, 100, 50, marks=full),
        pytest.param(3, 1, 200, 15, marks=full),
        pytest.param(2, 1, 300, 15, marks=full),
        pytest.param(4, 1, 400, 15, marks=full),
        pytest.param(2, 4, 500, 15, marks=long),
        pytest.param(8, 1, 600, 15, marks=long),
    ],
)
def test_programs_drawn_by_chance(processes: int, devices: int, first: int, programs: int):
    lines = run_job("random_programs.py", first, programs, processes=processes, devices=devices)
    assert_all(lines, f"{programs} programs are right")


@needs_native
@pytest.mark.parametrize(("processes", "devices"), [(2, 2), pytest.param(3, 1, marks=full)])
@pytest.mark.parametrize("cache", [False, pytest.param(True, marks=full)])
def test_processes_that_compile_at_different_times(processes, devices, cache, tmp_path):
    arguments = [tmp_path / "cache"] if cache else []
    for _ in range(1 + cache):  # the second time it is there
        lines = run_job("compiling.py", *arguments, processes=processes, devices=devices)
        assert_all(lines, "all rounds are right")


@full
def test_the_same_on_lax():
    lines = run_job("values.py", "all", processes=2, devices=2, JAXCOLL_BACKEND="lax")
    assert_all(lines, "all values are right")


@needs_native
@pytest.mark.parametrize(
    ("ops", "processes", "devices"),
    [
        pytest.param("all", 2, 2, marks=full),
        pytest.param("some", 4, 1, marks=full),
        pytest.param("all", 4, 1, marks=long),
        pytest.param("some", 2, 2, marks=long),
    ],
)
def test_two_hosts(processes: int, devices: int, ops: str):
    lines = run_job("values.py", ops, "hosts", processes=processes, devices=devices)
    assert_all(lines, "all values are right")


@pytest.mark.parametrize("runs", [pytest.param(20, marks=full), pytest.param(200, marks=long)])
@pytest.mark.parametrize("path", ["lax", pytest.param("two-level", marks=needs_native)])
def test_large_chunks_of_reduce_scatter_beside_gloo(path: str, runs: int):
    """Where Gloo's own gives wrong values now and then."""
    backend = "lax" if path == "lax" else "auto"
    job = ("scattered.py", runs, 16 << 20, path)
    lines = run_job(*job, processes=4, limit_s=280, JAXCOLL_BACKEND=backend)
    assert_all(lines, "all runs are right")
