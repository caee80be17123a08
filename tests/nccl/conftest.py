"""Programs for GPUs on simulated CPU devices, as in on_fake.py."""

import ctypes
import pathlib
from collections.abc import Callable, Iterator

import jax
import pytest
from nccl import on_fake

from jaxcoll import _cuda


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Returns a folder with the libraries that work on ordinary memory."""
    if problem := on_fake.missing():
        pytest.skip(problem)
    folder = tmp_path_factory.mktemp("nccl")
    on_fake.build(folder)
    return folder


@pytest.fixture(scope="session")
def engine(libraries: pathlib.Path) -> ctypes.CDLL:
    """Returns the engine, its handlers registered for CPU devices."""
    engine = on_fake.connect(libraries)
    engine.jaxcoll_cuda_set_peers(0)  # most tests are about NCCL
    return engine


@pytest.fixture
def gpus(engine: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], str]]:
    """Has programs for CPU lowered as for GPUs; returns what takes the log of NCCL's calls."""
    for where, name, value in on_fake.changes(engine):
        monkeypatch.setattr(where, name, value)
    jax.clear_caches()
    engine.fake.fake_cuda_take_log()
    yield lambda: engine.fake.fake_cuda_take_log().decode()
    jax.clear_caches()
    engine.jaxcoll_cuda_reset()


@pytest.fixture
def peers(engine: ctypes.CDLL, gpus: Callable[[], str]) -> Iterator[Callable[[], str]]:
    """As `gpus`, with small sums over peer memory."""
    engine.jaxcoll_cuda_set_peers(1)
    if problem := _cuda.peer_problem(engine, ()):
        pytest.skip(problem)
    yield gpus
    engine.jaxcoll_cuda_set_peers(0)
