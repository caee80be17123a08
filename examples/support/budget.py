"""Where a run is in its schedule: by steps, or by the clock where the machine is too slow."""

import time

from support.together import agree


class Budget:
    """Bounds a run by a number of steps and by time, whichever comes first.

    On a machine that is quick enough the position is the number of steps done, and so the run is
    reproducible. Otherwise the clock pushes it on, so that the learning rate still decays to its
    end within the limit, over fewer steps.

    Args:
        num_steps: Steps of the whole run; the last position.
        limit_s: Seconds for what is left of it, the first step excluded, which compiles.
        first_step: Steps done before (a resumed run).
    """

    def __init__(self, num_steps: int, limit_s: float, first_step: int = 0):
        self._num_steps, self._limit_s, self._first_step = num_steps, limit_s, first_step
        self._step, self._start_s = first_step, 0.0
        self.position = float(first_step)  # 0 to num_steps

    def count_step(self) -> None:
        """Count one more step, and move `position` on."""
        self._step += 1
        if self._step == self._first_step + 1:
            self._start_s = time.perf_counter()
        elapsed = (time.perf_counter() - self._start_s) / self._limit_s
        by_clock = self._first_step + elapsed * (self._num_steps - self._first_step)
        self.position = agree(min(max(float(self._step), by_clock), float(self._num_steps)))
