"""A process of a job that sums over peer memory on the fake: job_sums.py KIND LIBRARIES.

KIND: `sums`: all dtypes, and after a reset; `blocks`: collective matmuls; `refused`: the last
process can't map the others' memory; `late`, `late for a block` and `killed`: the last process
stays away from a call, or dies before it; `failed`: its group fails before it; `unprepared`: it
can't make what the call needs; `reset`: the last process comes late to `jaxcoll.reset`; `unable`:
it can't make what a rank needs.
"""

import ctypes
import functools as ft
import logging
import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from gpu import blocks, small_sums
from nccl import on_fake

import jaxcoll
from jaxcoll import _cuda, _native

LIMIT_S = 1.0

Log = Callable[[], str]


def main(kind: str, libraries: pathlib.Path) -> None:
    jaxcoll.initialize()
    shares = os.environ["JAXCOLL_TEST_GPUS"] == "shared"
    # Nobody sees the others' GPUs.
    os.environ["CUDA_VISIBLE_DEVICES"] = "0" if shares else str(jax.process_index())
    engine = on_fake.connect(libraries)
    _cuda.load = ft.cache(lambda: (engine, None))
    _cuda.load()
    for where, name, value in on_fake.changes(engine):
        setattr(where, name, value)
    all_devices = jax.devices
    jax.devices = lambda platform=None: all_devices()
    if kind == "refused" and _is_last():
        engine.fake.fake_cuda_refuse_to_open(ctypes.c_bool(True))
    if kind == "unable" and _is_last():
        engine.fake.fake_cuda_refuse_streams(ctypes.c_bool(True))
    with jax.enable_x64(True):
        _KINDS[kind](lambda: engine.fake.fake_cuda_take_log().decode())
        if kind == "sums":
            engine.jaxcoll_cuda_reset()  # new windows
            assert float(_run(_program())[0]) == jax.process_count()
            assert "memory of process" in engine.fake.fake_cuda_take_log().decode()
            print("and after a reset")


def _sum_all(log: Log) -> None:
    log()
    for found in small_sums.sums(_mesh()):
        lines = log()
        is_small = found.sent <= small_sums.MOST_BYTES
        way = "one_shot" if found.sent <= small_sums.ONE_SHOT_BYTES else "two_shot"
        assert found.order == ("by rank" if is_small else "NCCL's"), found
        assert lines.count(f"kernel jaxcoll_{way}") >= (2 if is_small else 0), (found, lines)
        # But for the number with which NCCL connects.
        is_nccls = "all_reduce" in lines.replace("all_reduce 1 type 2 ", "")
        assert is_nccls != is_small, (found, lines)
    print("all right")


def _multiply_blocks(log: Log) -> None:
    log()
    # The last one needs a larger window.
    for right in blocks.products(_mesh(), [(3, 5, 7), (16, 8, 24), (256, 2100, 1)]):
        lines = log()
        assert "kernel jaxcoll_say" in lines, (right, lines)
        assert "kernel jaxcoll_await" in lines, (right, lines)
        assert " send " not in lines, (right, lines)
    print("all right")


def _sum_with_nccl(log: Log) -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("jaxcoll").addHandler(handler)
    before = jaxcoll.explain(_program(), _ones()).rows[0].order
    assert before == "by rank"  # as far as was known
    log()
    assert float(_run(_program())[0]) == jax.process_count()
    lines = log()
    assert "kernel" not in lines, lines
    assert "all_reduce 8 type" in lines, lines
    assert jaxcoll.explain(_program(), _ones()).rows[0].order == "NCCL's"
    print("reason:", _native.gpu_peer_problem([device.id for device in jax.devices()]))
    print("said:", *(text for text in said if "are NCCL's" in text))


def _wait() -> None:
    time.sleep(5 * LIMIT_S)


def _stay_away(
    log: Log,
    leave: Callable[[], None] = _wait,
    f: Callable[[Any], Any] | None = None,
    limit_s: float = LIMIT_S,
    is_first: bool = False,
) -> None:
    del log
    program = _program(f or _total)
    for _ in range(2):  # the first time has another limit
        _run(_program() if is_first else program)
    jaxcoll.config.timeout_s = limit_s
    if _is_last():
        leave()
        os._exit(0)
    begun = time.monotonic()
    try:
        with jaxcoll.watch():
            _run(program)
    except jaxcoll.CollectiveError as error:
        print(f"raised after {time.monotonic() - begun:.0f} s: {error}")
        info = jaxcoll.error_info(error)
        print("missing:", [(rank.rank, rank.state) for rank in info.missing] if info else None)
    print("failures:", len(_cuda.failures()), flush=True)
    os._exit(0)


def _stay_away_from_a_block(log: Log) -> None:
    _stay_away(log, f=_product)


def _die(log: Log) -> None:
    _stay_away(log, lambda: os.kill(os.getpid(), signal.SIGKILL), limit_s=60)


def _fail_alone(log: Log) -> None:
    """NCCL finds an error of the last process, which makes the call no more."""

    def fail() -> None:
        engine: Any = _cuda.load()[0]
        engine.fake.fake_cuda_set_async_error_of_all(6)
        _wait()

    _stay_away(log, fail, limit_s=60)


def _stay_unprepared(log: Log) -> None:
    """CUDA refuses a matrix product of the last process."""

    def fail() -> None:
        engine: Any = _cuda.load()[0]
        engine.fake.fake_cuda_refuse_products(ctypes.c_bool(True))
        with pytest.raises(Exception, match="cublasLtMatmulDescCreate"):
            _run(_program(_product))
        _wait()

    _stay_away(log, fail, f=_product, limit_s=60, is_first=True)


def _fail_together(log: Log) -> None:
    del log
    begun = time.monotonic()
    try:
        _run(_program())
    except Exception as error:
        print(f"raised after {time.monotonic() - begun:.0f} s: {error}", flush=True)
    os._exit(0)


def _reset_again(log: Log) -> None:
    del log
    program = _program()
    assert float(_run(program)[0]) == jax.process_count()
    if _is_last():
        time.sleep(3 * LIMIT_S)
    else:
        jaxcoll.config.timeout_s = LIMIT_S
        for f, text in (
            (jaxcoll.reset, "did not come"),
            (lambda: _run(program), "not come to its"),
        ):
            with pytest.raises(Exception, match=text):
                f()
        jaxcoll.config.timeout_s = 60
    for _ in range(2):
        jaxcoll.reset()
        assert float(_run(program)[0]) == jax.process_count()
    print("all right")


_KINDS = {
    "sums": _sum_all,
    "blocks": _multiply_blocks,
    "refused": _sum_with_nccl,
    "late": _stay_away,
    "late for a block": _stay_away_from_a_block,
    "killed": _die,
    "failed": _fail_alone,
    "unprepared": _stay_unprepared,
    "reset": _reset_again,
    "unable": _fail_together,
}


def _is_last() -> bool:
    return jax.process_index() == jax.process_count() - 1


def _mesh() -> Any:
    return jax.make_mesh((jax.process_count(),), ("x",))


def _total(x: Any) -> Any:
    return jaxcoll.all_reduce(x, "x")


def _product(x: Any) -> Any:
    return jaxcoll.all_gather_matmul(x, x.T, "x", backend="native")


def _program(f: Callable[[Any], Any] = _total) -> Any:
    return jax.jit(
        jax.shard_map(f, mesh=_mesh(), in_specs=jax.P("x"), out_specs=jax.P("x"), check_vma=False)
    )


def _ones() -> Any:
    xs = np.ones((jax.process_count(), 8), np.float32)
    sharding = jax.NamedSharding(_mesh(), jax.P("x"))
    return jax.make_array_from_callback(xs.shape, sharding, lambda at: xs[at])


def _run(program: Any) -> Any:
    """Returns the sum on this process."""
    return np.asarray(program(_ones()).addressable_data(0))[0]


if __name__ == "__main__":
    main(sys.argv[1], pathlib.Path(sys.argv[2]))
