"""What `make bench-gpu` does, as far as no GPU is needed: all of it but the times."""

import argparse
import pathlib
import re
import shutil
import subprocess
import sys
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest
from checks import auto_is_native
from gpu.bench import (
    BENCHMARKS,
    gpu_cases,
    gpu_jobs,
    gpu_report,
    gpu_step,
    gpu_turns,
    program,
    raw_nccl,
)


class Tiny(nn.Module):
    """A language model that compiles in a moment."""

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        return nn.Dense(256)(nn.Embed(256, 4)(tokens))


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns a CUDA runtime and NCCL on ordinary memory, for ranks of one process."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    source = pathlib.Path(__file__).with_name("fake_nccl.cc")
    built = tmp_path_factory.mktemp("raw") / "fake.so"
    command = [compiler, "-std=c++20", "-O0", "-fPIC", "-shared", str(source), "-o", str(built)]
    subprocess.run(command, check=True, timeout=120)
    return raw_nccl.open_libraries({"runtime": [str(built)], "nccl": ["no.so", str(built)]})


def test_nccl_alone(libraries: Any):
    shared = []
    ranks = raw_nccl.Ranks(libraries, [0, 1], 0, 2, lambda own: shared.append(own) or own, 64)
    assert shared == [b"a" * 128]
    for seat in range(2):
        ranks.fill(seat, np.full(4, seat + 1, np.float32).tobytes())
    ranks.all_reduce([4], "float32", 2)  # in place: 1 + 2, and 3 + 3
    for seat in range(2):
        np.testing.assert_array_equal(np.frombuffer(ranks.read(seat, 16), np.float32), 6)
    ranks.all_gather(16, 1)
    got = np.frombuffer(ranks.read(1, 32), np.float32)[4:]
    np.testing.assert_array_equal(got, 2)
    ranks.copy(16, 1)
    np.testing.assert_array_equal(np.frombuffer(ranks.read(1, 16), np.float32), 2)
    with pytest.raises(raw_nccl.RawError, match="the buffers have 64 bytes, 80 are needed"):
        ranks.copy(80, 1)
    with pytest.raises(raw_nccl.RawError, match=r"no\.so"):
        raw_nccl.open_libraries({"runtime": ["no.so"], "nccl": []})


@pytest.mark.slow
@pytest.mark.skipif(not auto_is_native(), reason="about native calls")
def test_all_cases_on_simulated_devices(libraries: Any, monkeypatch: pytest.MonkeyPatch):
    """Every row is measured beside all that there is, and right; and stands on the page."""
    monkeypatch.setattr(gpu_cases, "_MANY", 2)
    monkeypatch.setattr(gpu_step, "TransformerLM", lambda *sizes: Tiny())
    ranks = raw_nccl.Ranks(libraries, [0, 1], 0, 2, lambda own: own, 1 << 16)
    together = gpu_jobs.Together()
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    options: dict[str, Any] = {"with_lax": True, "rounds": 2, "largest": 1 << 13}
    options |= {"products": ((8, 16, 4),)}
    rows = list(program.measure(together, mesh, ranks, seconds=60, **options))
    found = {row["call"]: row for row in rows}
    calls = ["all_gather_matmul", "all_reduce", "gradient tree, mean", "matmul_reduce_scatter"]
    assert sorted(found) == [*calls, "train step"]
    assert [row["wrong"] for row in rows] == [0] * len(rows)
    assert set(found["all_reduce"]["us"]) == {"ours", "lax", "nccl", "copy"}
    assert set(found["all_gather_matmul"]["us"]) == {"ours", "lax", "nccl", "alone"}
    assert set(found["train step"]["over ours"]) == {"lax", "alone"}
    # With no time, and with neither: rows that say so.
    none = list(program.measure(together, mesh, None, seconds=-1, **options))
    assert {row.get("left out") for row in none[1:]} == {"time"}
    some = list(program.measure(together, mesh, None, seconds=-1, calls="matmul", **options))
    assert {row["call"] for row in some} == {"all_gather_matmul", "matmul_reduce_scatter"}
    layout = {"layout": "two", "ranks": 2, "not beside": "", "rows": rows + none, "failed": "no"}
    of = {"date": "", "cores": 2, "cpu": "", "jax": "", "python": ""}
    page = gpu_report.page(
        {
            "environment": of,
            "command": "",
            "gpus": {"count": 1, "kind": "A", "versions": {"NCCL": "2"}},
            "not shared": "",
            "no mps": "none",
            "layouts": [layout],
        }
    )
    table = [line for line in page.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1
    assert len(table) == 2 + len(rows) + len(none)
    assert "**It has failed**: no" in page
    assert "No processes at once on a GPU: none." in page


@pytest.mark.skipif(not auto_is_native(), reason="about native calls")
@pytest.mark.parametrize("call", ["all_reduce", "all_gather_matmul", "matmul_reduce_scatter"])
def test_all_calls_of_a_row_are_made(call: str):
    """XLA may make one of equal ones, which times of one call would not tell."""
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    (case,) = (case for case in gpu_cases.cases(2, 1024, ((8, 16, 4),)) if case.call == call)
    programs = gpu_cases.Programs(case, mesh, with_lax=True)
    makes = {
        "ours": f'custom_call_target="jaxcoll_{call}"',
        "lax": r" (?:all-reduce|reduce-scatter|all-gather)(?:-start)?\(",
        "alone": r" dot\(",
    }
    for way, f in case.ways.items():
        text = programs._mapped(programs.program(f)).lower(programs._x).compile().as_text()
        assert len(re.findall(makes[way], text)) == case.in_a_row, way


@pytest.mark.full
@pytest.mark.skipif(not auto_is_native(), reason="about native calls")
def test_the_whole_program_on_cpu(tmp_path: pathlib.Path):
    """Processes that find each other, and a process with several devices."""
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--platform", "cpu"]
    command += ["--shared", "2", "--largest", "1024", "--rounds", "2", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    (page,) = tmp_path.glob("gpu-simulated-on-cpu_*.md")
    titles = [line for line in page.read_text().splitlines() if line.startswith("## ")]
    assert titles == [
        "## One rank alone", "## 2 processes that share a GPU, in turns",
        "## One process with 2 devices",
    ]  # fmt: skip
    assert page.read_text().count("| all_gather_matmul | 128, 512, 512 |") == 3


def test_turns():
    now, order = [0.0], []

    def way(name: str, seconds: float) -> Any:
        def run() -> None:
            order.append(name)
            now[0] += seconds

        return run

    ways = {"ours": way("ours", 1.0), "lax": way("lax", 2.0)}
    found = gpu_turns.in_turns(ways, gpu_jobs.Together(), 12.0, 20, clock=lambda: now[0])
    assert {name: len(times) for name, times in found.items()} == {"ours": 4, "lax": 4}
    assert order[4:8] == ["ours", "lax", "lax", "ours"]
    expected = {"us": {"ours": 0.5e6, "lax": 1e6}, "over ours": {"lax": 2.0}}
    assert gpu_turns.summary(found, 2) == expected


def test_layouts():
    def texts(*arguments: Any) -> list[str]:
        return [layout.text() for layout in program.layouts(*arguments)]

    assert texts(1, [2, 4], None, "none") == [
        "One rank alone", "2 processes that share a GPU, in turns",
        "4 processes that share a GPU, in turns",
    ]  # fmt: skip
    assert texts(1, [2], None, "") == [
        "One rank alone", "2 processes that share a GPU, in turns",
        "2 processes that share a GPU, at once, under MPS",
    ]  # fmt: skip
    assert texts(4, [2], "too old", "") == ["One rank alone", "One process with 4 devices"]
    old = gpu_jobs.Gpus(1, "A", {"NCCL": "2.29.7"})
    assert "NCCL 2.29.7 does not put several ranks" in old.sharing_problem()
    assert gpu_jobs.Gpus(1, "A", {"NCCL": "2.30.1"}).sharing_problem() is None


def test_a_job_that_fails_says_why(tmp_path: pathlib.Path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, time\n"
        "if os.environ['JAXCOLL_GPU_JOB'].endswith('1'): raise ValueError('one is wrong')\n"
        "time.sleep(60)\n"
    )
    said = gpu_jobs.run([script], 2, gpu_jobs.environment("cpu"), 2)
    assert [one.status for one in said] == [None, 1]
    assert gpu_jobs.reason_of(said) == "status 1: ValueError: one is wrong"


@pytest.mark.full
def test_a_process_says_what_devices_there_are():
    """Of CPU devices as of GPUs, but for the versions of NVIDIA's libraries."""
    found = gpu_jobs.ask("cpu")
    assert found.count == 0
    assert "programs for GPUs run on jax.lax" in found.problem
    assert {"jax", "jaxcoll"} <= set(found.versions)


def test_what_a_layout_is_run_with(monkeypatch: pytest.MonkeyPatch):
    """Where processes share a GPU a first job says what runs there; all ends in time."""
    asked: list[tuple[list[str], int, float]] = []
    answers: list[list[Any]] = []

    def run(command: Any, processes: int, environment: Any, limit_s: float) -> Any:
        del environment
        asked.append(([str(part) for part in command[1:]], processes, limit_s))
        return answers.pop(0)

    monkeypatch.setattr(gpu_jobs, "run", run)
    chosen = argparse.Namespace(platform="cuda", rounds=3, largest=1024, calls="")
    said = gpu_jobs.Said
    shared = program.Layout(2, 1, is_shared=True)
    answers += [
        [said("nccl works\n", 1), said("nccl works\nRuntimeError: Duplicate GPU\n", 1)],
        [said('{"call": "a"}\n{"call": "b"}\n', 0), said("", 0)],
    ]
    found = program.run_layout(shared, chosen, 60.0, {})
    assert [row["call"] for row in found["rows"]] == ["a", "b"]
    assert (found["failed"], found["not beside"]) == ("", "status 1: RuntimeError: Duplicate GPU")
    (probe, _, _), (measure, processes, limit_s) = asked
    assert probe == ["--child", "probe"]
    assert (processes, measure[-1]) == (2, "--nccl")  # and no lax
    assert limit_s < 110
    # Rows of a job that did not come to its end are kept.
    answers.append([said('{"call": "a"}\nmeasuring\n', None)])
    found = program.run_layout(program.Layout(1, 1, is_shared=False), chosen, 60.0, {})
    assert len(found["rows"]) == 1
    assert found["failed"] == "ended at its limit: measuring"
    assert asked[-1][0][-2:] == ["--nccl", "--lax"]


def test_the_probe(libraries: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    monkeypatch.setattr(raw_nccl, "of_jax", lambda: libraries)
    program.probe(4096)
    assert capsys.readouterr().out.splitlines() == ["nccl works", "lax works"]


def test_the_environment_of_those_that_share(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    found = gpu_jobs.environment("cuda", sharing=4)
    assert found["CUDA_VISIBLE_DEVICES"] == "3"
    assert found["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert found["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.15"
    assert "NCCL_MULTI_RANK_GPU_ENABLE" not in gpu_jobs.environment("cuda")


def test_mps(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    """It is started for the jobs within, and told to end; or says why there is none."""
    control = tmp_path / "nvidia-cuda-mps-control"
    control.write_text(
        "#!/bin/sh\n"
        f'echo "$@" "$CUDA_MPS_PIPE_DIRECTORY" >> {tmp_path}/log\n'
        f'[ -n "$1" ] && [ -e {tmp_path}/no ] && {{ echo "no room" >&2; exit 1; }}\n'
        f'[ -n "$1" ] || cat >> {tmp_path}/log\n'
    )
    monkeypatch.setenv("PATH", "/no/such/folder")
    with gpu_jobs.mps() as mps:
        assert mps == ({}, "there is no nvidia-cuda-mps-control")
    control.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(gpu_jobs, "ask", lambda platform, **more: gpu_jobs.Gpus(1))
    with gpu_jobs.mps() as mps:
        assert mps.problem == ""
        folder = mps.needed["CUDA_MPS_PIPE_DIRECTORY"]
    assert (tmp_path / "log").read_text() == f"-d {folder}\n{folder}\nquit\n"
    (tmp_path / "no").touch()
    with gpu_jobs.mps() as mps:
        assert mps == ({}, "nvidia-cuda-mps-control: no room")
