"""Text that every machine with Python has: the standard library's own source, as bytes."""

import dataclasses
import hashlib
import pathlib
import sysconfig
from typing import Any

import numpy as np

# Installed packages aren't the library; tests are missing from many builds of Python; the codecs
# and pydoc_data are generated tables, near copies of each other, which would flatter any model.
_SKIPPED_FOLDERS = frozenset(
    ["site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"]
)
FILE_SEPARATOR = b"\0"  # occurs in no source file


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Training and held-out text, from files that are in one of the two only.

    Attributes:
        training_files: Paths relative to the standard library, sorted.
        held_out_files: Likewise.
        training: Their bytes, joined by `FILE_SEPARATOR`. Shape `(n,)`, uint8.
        held_out: Likewise.
    """

    training_files: list[pathlib.Path]
    held_out_files: list[pathlib.Path]
    training: np.ndarray
    held_out: np.ndarray

    def describe(self) -> str:
        """Return a line about each part."""
        return (
            f"training text: {len(self.training_files)} files, {len(self.training) / 1e6:.2f} MB\n"
            f"held-out text: {len(self.held_out_files)} files, {len(self.held_out) / 1e6:.2f} MB"
        )


def stdlib_folder() -> pathlib.Path:
    """Return the folder of the running Python's standard library."""
    return pathlib.Path(sysconfig.get_paths()["stdlib"])


def source_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """List the `.py` files under `folder` that belong to the text, relative to it and sorted."""
    paths = (path.relative_to(folder) for path in folder.rglob("*.py"))
    return sorted(path for path in paths if _SKIPPED_FOLDERS.isdisjoint(path.parts))


def is_held_out(path: pathlib.PurePath, percent: int = 10) -> bool:
    """Say whether a file is held out: `percent` in a hundred are, decided by the path alone.

    A hash rather than a shuffle, so that a file stays on its side when others come or go.
    """
    digest = hashlib.sha256(path.as_posix().encode()).digest()
    return int.from_bytes(digest[:8], "big") % 100 < percent


def load_corpus(folder: pathlib.Path | None = None) -> Corpus:
    """Read the source files under `folder` (default: the standard library), split by file.

    Raises:
        FileNotFoundError: No source for one of the two parts (a Python without its sources).
    """
    folder = stdlib_folder() if folder is None else folder
    files = source_files(folder)
    training = [path for path in files if not is_held_out(path)]
    held_out = [path for path in files if is_held_out(path)]
    if not training or not held_out:
        raise FileNotFoundError(
            f"load_corpus: expected Python source files in {folder}, got {len(files)}; "
            "use a Python that was installed with its standard library as .py files"
        )
    return Corpus(training, held_out, _read(folder, training), _read(folder, held_out))


def random_windows(
    text: np.ndarray, shape: tuple[int, int], seed: tuple[int, int], index: Any = slice(None)
) -> np.ndarray:
    """Cut windows at random places.

    Args:
        text: Shape `(n,)`, uint8.
        shape: Number of windows, bytes of each.
        seed: Decides the places alone, so that with the step in it a resumed run needs no state.
        index: Of the windows that are wanted; all without.

    Returns:
        The part at `index` of an array of shape `shape`, uint8.
    """
    num_windows, num_bytes = shape
    starts = np.random.default_rng(seed).integers(0, len(text) - num_bytes + 1, num_windows)
    rows = index[0] if isinstance(index, tuple) else index
    return text[starts[rows, None] + np.arange(num_bytes)]


def even_windows(text: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Cut windows at even distances over the whole text: the same ones each time.

    Args:
        text: Shape `(n,)`, uint8.
        shape: Number of windows, bytes of each.

    Returns:
        Shape `shape`, uint8.
    """
    num_windows, num_bytes = shape
    starts = np.linspace(0, len(text) - num_bytes, num_windows).astype(np.int64)
    return text[starts[:, None] + np.arange(num_bytes)]


def _read(folder: pathlib.Path, files: list[pathlib.Path]) -> np.ndarray:
    return np.frombuffer(FILE_SEPARATOR.join((folder / f).read_bytes() for f in files), np.uint8)
