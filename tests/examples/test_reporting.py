"""The progress bar, the options, the measured times and the picture."""

import dataclasses
import io

import numpy as np
import pytest
from support import picture
from support.budget import Budget
from support.options import option, parse
from support.progress import Progress
from support.timing import Comparison


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """Replace the clock: entry 0 is the time in seconds."""
    now_s = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now_s[0])
    return now_s


def test_on_a_terminal_one_line_redraws_itself():
    stream = Terminal()
    progress = Progress(end=4, tokens_per_step=100, stream=stream)
    for step, loss in enumerate((4.0, 3.0, 2.0, 1.0)):
        progress.update(loss, position=step + 1)
    progress.close()
    drawn = stream.getvalue()
    assert drawn.count("\r") == 4
    assert drawn.count("\n") == 1
    last = drawn.rpartition("\r")[2]
    assert "#" * 24 + "] 100%  step 4  loss 2.500 nats/byte" in last
    assert "0:00 left" in last


def test_elsewhere_it_prints_plain_lines_and_not_for_every_step():
    stream = io.StringIO()
    progress = Progress(end=1003, tokens_per_step=100, first_step=503, stream=stream)
    for step in range(503, 1003):
        progress.update(2.0, position=step + 1)
    progress.close()
    lines = stream.getvalue().splitlines()
    assert 10 <= len(lines) <= 12
    assert "50%  step 504" in lines[0]
    assert "100%  step 1003" in lines[-1]
    assert not set("\r\x1b") & set(stream.getvalue())


def test_time_left_is_that_of_the_way_left_and_leaves_out_the_compilation(clock):
    stream = io.StringIO()
    progress = Progress(end=20, tokens_per_step=1000, stream=stream)
    clock[0] += 1000.0  # the first step compiles
    progress.update(2.0, position=1)
    assert "left" not in stream.getvalue()
    for step in range(1, 10):
        clock[0] += 10.0
        progress.update(2.0, position=step + 1)
    assert stream.getvalue().splitlines()[-1].endswith("100 tokens/s  1:40 left")


def test_the_steps_are_the_position_on_a_quick_machine(clock):
    budget = Budget(num_steps=10, limit_s=100.0, first_step=4)
    for step in range(4, 10):
        assert budget.position == step
        clock[0] += 1.0
        budget.count_step()
    assert budget.position == 10


def test_the_clock_is_the_position_on_a_slow_machine(clock):
    budget = Budget(num_steps=10, limit_s=100.0, first_step=4)
    clock[0] += 500.0  # the first step compiles, at nobody's expense
    budget.count_step()
    assert budget.position == 5
    clock[0] += 50.0
    budget.count_step()
    assert budget.position == 7  # half of the time, so half of the six steps
    clock[0] += 60.0
    budget.count_step()
    assert budget.position == 10  # never beyond the end


@dataclasses.dataclass(frozen=True)
class Options:
    """Some options."""

    num_steps: int = option(3, "steps")
    rate: float = option(0.5, "per second, 100%% at most")
    again: bool = option(False, "twice")


def test_options_come_from_the_dataclass(capsys):
    assert parse("A program.", Options, argv=[]) == [Options()]
    arguments = ["--num-steps=7", "--rate", "2", "--again"]
    assert parse("A program.", Options, argv=arguments) == [Options(7, 2.0, True)]
    with pytest.raises(SystemExit):
        parse("A program.", Options, argv=["--num-steps=many"])
    assert "invalid int value: 'many'" in capsys.readouterr().err


def test_ratios_and_differences_are_taken_round_by_round():
    # The machine is three times slower in the second round: a ratio of medians would say 2 / 1.
    comparison = Comparison(
        native_s=np.array([1.0, 3.0, 1.0]),
        lax_s=np.array([2.0, 4.5, 1.5]),
        compute_s=np.array([0.5, 2.0, 0.75]),
    )
    assert comparison.speedup == 1.5
    assert comparison.sync_s("native").tolist() == [0.5, 1.0, 0.25]
    assert comparison.sync_s("lax").tolist() == [1.5, 2.5, 0.75]


@pytest.mark.parametrize("timed", [True, False])
def test_the_picture_of_any_run_is_drawn(tmp_path, timed):
    # A sync below nought (noise) and a single step are drawn too.
    times_s = np.array([0.10, 0.11, 0.12])
    contents = picture.Picture(
        losses=[5.5],
        held_out=5.4,
        bigram=2.4,
        comparison=Comparison(times_s - 0.01, times_s + 0.01, times_s) if timed else None,
        caption="a test",
    )
    picture.save(contents, tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
