"""A progress bar: one line that redraws itself on a terminal, plain lines elsewhere."""

import collections
import io
import sys
import time
from typing import TextIO

import jax

_BAR_WIDTH = 24  # characters
_WINDOW_STEPS = 30  # the rates and the loss shown are means over this many steps
_PLAIN_LINES = 20  # per run, where there is no terminal


class Progress:
    """Show step, loss, tokens per second and time left.

    Args:
        end: The position at which the run is done.
        tokens_per_step: Tokens that one step trains on.
        first_step: Steps done before (a resumed run).
        stream: Where to write; if None, to standard output, from the first process.
    """

    def __init__(
        self, end: int, tokens_per_step: int, first_step: int = 0, stream: TextIO | None = None
    ):
        self._end, self._tokens_per_step = end, tokens_per_step
        self._step = self._first_step = first_step
        shown = sys.stdout if jax.process_index() == 0 else io.StringIO()
        self._stream = shown if stream is None else stream
        self._losses: collections.deque[float] = collections.deque(maxlen=_WINDOW_STEPS)
        self._places = collections.deque(
            [(time.perf_counter(), float(first_step))], maxlen=_WINDOW_STEPS + 1
        )
        self._next_line = float(first_step)  # the position from which another plain line is due

    def update(self, loss: float, position: float) -> None:
        """Count one more step.

        Args:
            loss: Of the step, in nats per byte.
            position: Where the run is now, on its way to `end`.
        """
        self._step += 1
        self._losses.append(loss)
        self._places.append((time.perf_counter(), position))
        if self._step == self._first_step + 2:
            self._places.popleft()  # the first step compiled: no measure for the others
        if self._stream.isatty():
            self._stream.write("\r" + self._line() + "\x1b[K")  # clear what a longer line left
            self._stream.flush()
        elif position >= min(self._next_line, self._end):
            self._next_line = position + self._end / _PLAIN_LINES
            print(self._line(), file=self._stream, flush=True)

    def close(self) -> None:
        """Leave the bar's line."""
        if self._stream.isatty() and self._losses:
            print(file=self._stream)

    def _line(self) -> str:
        (start_s, start), (now_s, position) = self._places[0], self._places[-1]
        filled = int(_BAR_WIDTH * position / self._end)
        line = (
            f"[{'#' * filled}{'.' * (_BAR_WIDTH - filled)}] {100 * position / self._end:3.0f}%  "
            f"step {self._step}  loss {sum(self._losses) / len(self._losses):.3f} nats/byte"
        )
        if self._step == self._first_step + 1:
            return line  # the only time so far is that of compiling
        tokens = self._tokens_per_step * (len(self._places) - 1)
        left_s = round((self._end - position) * (now_s - start_s) / (position - start))
        rate = f"{tokens / (now_s - start_s):,.0f} tokens/s"
        return f"{line}  {rate}  {left_s // 60}:{left_s % 60:02d} left"
