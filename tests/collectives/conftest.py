"""64-bit types, and no promotion that the library or a test did not write down."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def strict_jax() -> Iterator[None]:
    with (
        jax.enable_x64(True),
        jax.numpy_dtype_promotion("strict"),
        jax.numpy_rank_promotion("raise"),
    ):
        yield
