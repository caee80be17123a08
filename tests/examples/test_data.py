import hashlib
import pathlib

import numpy as np
import pytest
from support import data


@pytest.fixture(scope="module")
def corpus() -> data.Corpus:
    return data.load_corpus()


def write_library(folder: pathlib.Path, num_files: int) -> None:
    for i in range(num_files):
        path = folder / f"package_{i % 3}" / f"module_{i}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"value = {i}\n")


def test_no_file_is_on_both_sides(corpus):
    training, held_out = set(corpus.training_files), set(corpus.held_out_files)
    assert training.isdisjoint(held_out)
    assert len(training) == len(corpus.training_files)
    assert sorted(training | held_out) == data.source_files(data.stdlib_folder())


def test_the_text_is_that_of_its_files(corpus):
    folder = data.stdlib_folder()
    for files, text in (
        (corpus.training_files, corpus.training),
        (corpus.held_out_files, corpus.held_out),
    ):
        wanted = data.FILE_SEPARATOR.join((folder / path).read_bytes() for path in files)
        assert hashlib.sha256(text).digest() == hashlib.sha256(wanted).digest()


def test_about_a_tenth_is_held_out(corpus):
    share = len(corpus.held_out_files) / (len(corpus.held_out_files) + len(corpus.training_files))
    assert 0.05 < share < 0.15
    assert len(corpus.held_out) > 200_000


def test_the_split_is_the_same_each_time(corpus):
    again = data.load_corpus()
    assert again.training_files == corpus.training_files
    assert np.array_equal(again.held_out, corpus.held_out)
    # Known values: the split must not depend on the process (hash(str) does) or on the platform.
    assert data.is_held_out(pathlib.PurePosixPath("struct.py"))
    assert not data.is_held_out(pathlib.PurePosixPath("argparse.py"))


def test_a_file_keeps_its_side_when_others_come(tmp_path):
    write_library(tmp_path, 40)
    before = set(data.load_corpus(tmp_path).held_out_files)
    write_library(tmp_path, 80)
    after = data.load_corpus(tmp_path)
    assert before <= set(after.held_out_files)
    assert len(after.held_out_files) + len(after.training_files) == 80


@pytest.mark.parametrize("folder", ["site-packages", "test", "encodings", "json/tests"])
def test_what_is_not_the_library_is_left_out(tmp_path, folder):
    write_library(tmp_path, 3)
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "module.py").write_text("x = 1\n")
    assert len(data.source_files(tmp_path)) == 3


def test_a_library_without_source_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"expected Python source files in .*, got 0"):
        data.load_corpus(tmp_path)


def test_random_windows_are_cuts_of_the_text_and_depend_on_the_seed_alone():
    text = np.arange(200, dtype=np.uint8)
    windows = data.random_windows(text, (50, 8), seed=(0, 7))
    assert windows.shape == (50, 8)
    assert windows.dtype == np.uint8
    assert np.array_equal(windows - windows[:, :1], np.tile(np.arange(8, dtype=np.uint8), (50, 1)))
    assert np.array_equal(windows, data.random_windows(text, (50, 8), seed=(0, 7)))
    assert not np.array_equal(windows, data.random_windows(text, (50, 8), seed=(0, 8)))
    assert not np.array_equal(windows, data.random_windows(text, (50, 8), seed=(1, 7)))


def test_random_windows_reach_both_ends():
    text = np.arange(10, dtype=np.uint8)
    windows = data.random_windows(text, (500, 8), seed=(0, 0))
    assert set(windows[:, 0]) == {0, 1, 2}


def test_even_windows_span_the_text():
    text = np.arange(100, dtype=np.uint8)
    windows = data.even_windows(text, (4, 10))
    assert windows[:, 0].tolist() == [0, 30, 60, 90]
    assert windows[-1, -1] == 99
