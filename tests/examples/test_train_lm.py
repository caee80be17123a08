"""`train_lm.py` from the command line, on a model small enough to train in a second."""

import pathlib
import re
import struct

import pytest
from checks import native_missing

NO_TIMING = "--compare-seconds=0"


def held_out_loss(output: str) -> str:
    found = re.search(r"^held-out loss: (\S+) nats/byte$", output, re.MULTILINE)
    assert found, output
    return found[1]


def saved_losses(out: pathlib.Path) -> list[float]:
    from support.checkpoints import Checkpoints

    checkpoints = Checkpoints(out / "checkpoints", keep=True)
    return checkpoints.latest_record()[1]


def test_help_explains_every_option(run_example, examples_folder):
    done = run_example("train_lm.py", "--help")
    assert done.returncode == 0, done.stderr
    source = (examples_folder / "train_lm.py").read_text()
    names = re.findall(r"^    (\w+): \w+ = option\(", source, re.MULTILINE)
    assert len(names) > 10
    text = " ".join(done.stdout.split())
    for name in names:
        flag = "--" + name.replace("_", "-")
        assert re.search(rf"{flag} .*?\(default: ", text), flag


@pytest.mark.skipif(native_missing() is not None, reason="compares the native path with lax")
def test_a_short_run_reports_times_and_draws(whole_run):
    done, folder = whole_run
    # Exit code 0 although six steps can't beat the bigram model: a short run isn't held to it.
    assert done.returncode == 0, done.stderr
    for pattern in (
        r"^training text: \d+ files, [\d.]+ MB$",
        r"^held-out text: \d+ files, [\d.]+ MB$",
        r"parameters, 8 x 16 bytes per step, on 8 simulated devices",
        r"100%  step 6  loss \d\.\d+ nats/byte  [\d,]+ tokens/s  0:00 left$",
        r"^bigram model on the same bytes: [\d.]+ nats/byte$",
        r"^margin: .*NOT REACHED$",
        r"^  native: +[\d,]+ tokens/s",
        r"^  lax: +[\d,]+ tokens/s",
        r"^  native is [\d.]+ times as fast",
        r"^sample:\n +def ",
        r"^picture: out/train_lm/train_lm.png$",
    ):
        assert re.search(pattern, done.stdout, re.MULTILINE), (pattern, done.stdout)
    assert "\r" not in done.stdout  # no terminal, so plain lines
    picture = (folder / "out/train_lm/train_lm.png").read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", picture[16:24])
    assert width > 1000
    assert height > 500


@pytest.mark.full
def test_a_resumed_run_equals_an_uninterrupted_one(run_example, tiny, tmp_path, whole_run):
    first = run_example("train_lm.py", *tiny, "--steps=6", "--stop-after=3", "--out=parts")
    assert first.returncode == 0, first.stderr
    assert "stopped after step 3" in first.stdout
    assert len(saved_losses(tmp_path / "parts")) == 3
    # No word of the model or of the steps this time: those of the checkpoint hold.
    how = (NO_TIMING, "--eval-windows=8", "--sample-bytes=8")
    second = run_example("train_lm.py", *how, "--resume", "--out=parts")
    assert second.returncode == 0, second.stderr
    whole, folder = whole_run
    losses = saved_losses(folder / "out/train_lm")
    assert len(losses) == 6
    assert saved_losses(tmp_path / "parts") == losses  # to the last bit
    assert held_out_loss(second.stdout) == held_out_loss(whole.stdout)


@pytest.mark.full
def test_a_product_of_strategies(run_example, tiny):
    done = run_example(
        "train_lm.py",
        *tiny,
        *("--mesh=pipe=2,data=2,tensor=2", "--num-layers=2", "--steps=2", NO_TIMING),
    )
    assert done.returncode == 0, done.stderr
    assert "100%  step 2  loss" in done.stdout


@pytest.mark.full
def test_resume_without_a_checkpoint_says_what_to_do(run_example, tiny):
    done = run_example("train_lm.py", *tiny, "--resume", "--out=nothing")
    assert done.returncode != 0
    assert re.search(r"expected a checkpoint in .*nothing.*train without --resume", done.stderr)


@pytest.mark.full
@pytest.mark.parametrize("option", ["--batch", "--eval-windows"])
def test_windows_that_cannot_be_split_name_the_option(run_example, tiny, option):
    threes = ("--batch=3", "--eval-windows=3")
    done = run_example("train_lm.py", *tiny, *threes, f"{option}=16", "--mesh=data=3")
    assert done.returncode != 0
    assert re.search(rf"^{option}: 16 windows can't be split evenly over 3", done.stderr, re.M)


@pytest.mark.full
def test_a_full_length_run_that_misses_the_margin_fails(run_example, tiny):
    # No blocks: it can at best learn what the bigram model counts.
    arguments = (*tiny, "--num-layers=0", "--devices=2", "--batch=2", NO_TIMING)
    done = run_example("train_lm.py", *arguments)
    assert "NOT REACHED" in done.stdout, done.stderr
    assert done.returncode == 1


@pytest.mark.full
def test_a_short_limit_ends_the_training_and_says_so(run_example, tiny):
    done = run_example("train_lm.py", *tiny, NO_TIMING, "--steps=100000", "--minutes=0.01")
    assert done.returncode == 0, done.stderr
    assert re.search(r"100%  step \d{1,4}  loss", done.stdout), done.stdout
    assert re.search(r"^the limit of 0.01 minutes: \d+ of 100000 steps$", done.stdout, re.M)


@pytest.mark.parametrize(("name", "limit"), [("train_lm.py", 200)])
def test_it_stays_short_enough_to_copy(examples_folder, name, limit):
    lines = (examples_folder / name).read_text().splitlines()
    assert len(lines) < limit
    assert max(map(len, lines)) <= 100
