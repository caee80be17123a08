"""On real GPUs: `make test-gpu`. Skips, with the reason, what the machine lacks."""

import contextlib
import functools as ft
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys

import pytest

JOB = pathlib.Path(__file__).with_name("job.py")
LIMIT_S = 400
# The first whose communicators may have several ranks on one GPU.
SHARING_NCCL = (2, 30)


@ft.cache
def gpus() -> tuple[int, tuple[int, ...], str]:
    """Returns how many GPUs there are, the version of NCCL, and why there are none."""
    if shutil.which("nvidia-smi") is None:
        return 0, (), "there is no NVIDIA driver"
    code = (
        "import jax, jaxcoll; i = jaxcoll.info(); "
        "print(len(jax.devices('cuda')), i.versions.get('NCCL', i.off.get('GPU')), sep='|')"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S,
        env={**os.environ, "JAX_PLATFORMS": "cuda"},
    )  # fmt: skip
    if found.returncode:
        return 0, (), f"JAX has no GPUs: {found.stderr.strip().splitlines()[-1]}"
    count, _, nccl = found.stdout.strip().splitlines()[-1].partition("|")
    if not re.fullmatch(r"[\d.]+", nccl):
        return 0, (), nccl
    return int(count), tuple(map(int, nccl.split("."))), ""


def needs(count: int, nccl: tuple[int, ...] = ()) -> None:
    found, version, reason = gpus()
    if found < count:
        pytest.skip(reason or f"{count} GPUs are needed, {found} are here")
    if version < nccl:
        pytest.skip(f"NCCL {version} does not put several ranks on one GPU")


def environment(**more: str) -> dict[str, str]:
    return {
        **os.environ,
        "JAX_PLATFORMS": "cuda",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "JAXCOLL_DUMP_DIR": "none",
        **more,
    }


def sharing(what: str, count: int) -> list[str]:
    """Runs a job of processes that share one GPU; returns what each has written."""
    with contextlib.closing(socket.socket()) as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    processes = [
        subprocess.Popen(
            [sys.executable, str(JOB), what, address, str(count), str(i)],
            env=environment(
                NCCL_MULTI_RANK_GPU_ENABLE="1", NCCL_MAX_CTAS="4", CUDA_VISIBLE_DEVICES="0"
            ),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for i in range(count)
    ]  # fmt: skip
    try:
        return [process.communicate(timeout=LIMIT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()


@pytest.mark.parametrize("count", [2, 4])
def test_processes_that_share_a_gpu(count: int):
    needs(1, SHARING_NCCL)
    for text in sharing("conform", count):
        assert re.search(r"^right: [1-9]\d+, on lax: \d$", text, re.M), text


def test_all_gpus_of_a_process():
    needs(2)
    done = subprocess.run(
        [sys.executable, str(JOB), "conform"], env=environment(), timeout=LIMIT_S,
        capture_output=True, text=True,
    )  # fmt: skip
    assert re.search(r"^right: [1-9]\d+, on lax: \d$", done.stdout, re.M), done.stdout + done.stderr


def test_one_that_does_not_call_makes_the_others_raise():
    needs(1, SHARING_NCCL)
    *others, last = sharing("late", 2)
    assert "was late" in last
    for text in others:
        assert re.search(r"^raised after [5-9] s: .*all_reduce over .*waited", text, re.M), text
