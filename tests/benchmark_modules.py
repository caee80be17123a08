"""The way to the modules of `benchmarks/`, for tests of these."""

import contextlib
import pathlib
import sys
from collections.abc import Iterator

BENCHMARKS = pathlib.Path(__file__).parents[1] / "benchmarks"


@contextlib.contextmanager
def importable() -> Iterator[None]:
    """Lets them be imported, for a moment: some have the names of tests' own modules."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield
    finally:
        sys.path.remove(str(BENCHMARKS))
