"""On real GPUs: `make test-gpu`. Skips, with the reason, what the machine lacks."""

import pathlib
import re
from collections.abc import Iterator
from typing import Any

import pytest
from gpu import blocks, faults
from gpu.bench import gpu_jobs

JOB = pathlib.Path(__file__).with_name("job.py")
LIMIT_S = 150
SMALL_LIMIT_S = 90
FAULT_LIMIT_S = 90
# Beyond the limit: until the engine looks, NCCL has ended and XLA has told.
GRACE_S = 8
# What NCCL has not: "and" and "or" of integers, products of complex numbers.
MOST_ON_LAX = 4
# Many programs that run twice are compiled: nobody needs the fastest kernels.
QUICKLY = {"XLA_FLAGS": "--xla_gpu_autotune_level=0", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def run(what: str, processes: int, limit_s: float = LIMIT_S, **more: str) -> list[Any]:
    sharing = processes if processes > 1 else 0
    needed = gpu_jobs.environment("cuda", sharing=sharing, **QUICKLY, **more)
    return gpu_jobs.run([JOB, what], processes, needed, limit_s, end_together=what == "whole")


def needs(count: int, *, sharing: bool = False) -> None:
    gpus = gpu_jobs.find()
    if gpus.count < count:
        pytest.skip(gpus.problem or f"{count} GPUs are needed, {gpus.count} are here")
    if sharing and (problem := gpus.sharing_problem()):
        pytest.skip(problem)


def assert_whole(said: list[Any]) -> None:
    """Asserts that all processes have found everything right."""
    for text, status in said:
        assert status == 0, text
        found = re.search(r"^right: (\d+), on lax: (\d+)$", text, re.M)
        assert found is not None, text
        assert int(found[1]) > 0, text
        assert int(found[2]) <= MOST_ON_LAX, text
        assert "as on one device: data parallel; fully sharded, stage 1;" in text, text


@pytest.fixture(params=["in turns", "at once"], scope="module")
def shared(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """Returns the variables of processes that share a GPU: taking turns, or under CUDA's MPS."""
    needs(1, sharing=True)
    if request.param == "in turns":
        yield {}
        return
    with gpu_jobs.mps() as mps:
        if mps.problem:
            pytest.skip(f"no MPS: {mps.problem}")
        yield mps.needed


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_that_share_a_gpu(processes: int, shared: dict[str, str]):
    assert_whole(run("whole", processes, **shared))


def assert_small(said: list[Any]) -> None:
    """Asserts that all processes have found small sums right, and in the order of the ranks."""
    for text, status in said:
        assert status == 0, text
        found = re.search(r"^right: \d+, small: (\d+), by rank: (\d+)$", text, re.M)
        assert found is not None, text
        assert found[1] == found[2], text


def skip_without_peer_memory(said: list[Any]) -> None:
    for line in said[0].text.splitlines():
        if "small sums over peer memory" in line:  # `jaxcoll.info` says why not
            pytest.skip(line)


@pytest.mark.parametrize("processes", [2, 4])
def test_small_sums_of_processes_that_share_a_gpu(processes: int, shared: dict[str, str]):
    """Over peer memory: each reads what the others have on the same GPU."""
    said = run("small", processes, SMALL_LIMIT_S, **shared)
    skip_without_peer_memory(said)
    assert_small(said)


def assert_blocks(said: list[Any], *ways: str) -> None:
    """Asserts that all processes have found collective matmuls right, in each of these ways."""
    for text, status in said:
        assert status == 0, text
        for way in ways:
            assert f"{way}: {2 * len(blocks.SHAPES)} products" in text, text


def test_collective_matmuls_of_processes_that_share_a_gpu(shared: dict[str, str]):
    """Of four, which also pass on what they get."""
    said = run("blocks", 4, SMALL_LIMIT_S, **shared)
    skip_without_peer_memory(said)
    assert_blocks(said, "over peer memory", "by NCCL")


def test_all_gpus_of_a_process():
    needs(2)
    assert_whole(run("whole", 1))


def test_one_rank_alone():
    """Which has nobody to communicate with: all of its calls are on lax."""
    needs(1)
    assert_whole(run("few", 1, CUDA_VISIBLE_DEVICES=gpu_jobs.first_visible()))


@pytest.mark.parametrize("kind", faults.FAULTS)
def test_the_others_raise(kind: str):
    needs(1, sharing=True)
    *others, _ = run(kind, 2, FAULT_LIMIT_S)
    for text, _ in others:
        found = re.search(rf"^raised after (\d+) s: .*{faults.FAULTS[kind].op} over", text, re.M)
        assert found is not None, text
        assert int(found[1]) <= faults.LIMIT_S + GRACE_S, text
