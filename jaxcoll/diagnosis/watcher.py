"""The thread that looks after this process, so that others can say what it does.

Several times a second it notes in the black box what the main thread does, and its stack; it
answers those that ask, and writes a dump when a call has failed or when it is asked for one.
"""

import atexit
import functools as ft
import threading
from typing import Any

import jax

from jaxcoll import _native
from jaxcoll._config import logger
from jaxcoll.diagnosis import dumps, errors
from jaxcoll.diagnosis.stacks import Stacks

_PERIOD_S = 0.2
_FIRST_PERIOD_S = 0.01
_JOIN_S = 2.0


@ft.cache
def start() -> None:
    """Looks after this process from now on; without the extension it does nothing."""
    core = _native.core()
    if core is not None:
        watcher = _Watcher(core)
        watcher.start()
        atexit.register(watcher.end)


class _Watcher(threading.Thread):
    def __init__(self, core: Any) -> None:
        super().__init__(name="jaxcoll-diagnosis", daemon=True)
        self._core = core
        self._stops = threading.Event()
        self._stacks = Stacks()
        self._failure = self._seen_failure()
        self._num_asked = core.dumps_asked()
        self._lock = threading.Lock()
        core.dump_on_signal()
        dumps.tell_engine()

    def run(self) -> None:
        period_s = _FIRST_PERIOD_S
        while not self._stops.wait(period_s):
            try:
                self.look()
            except Exception:  # the next look may succeed
                logger.warning("jaxcoll: this process's diagnosis failed", exc_info=True)
            period_s = min(2 * period_s, _PERIOD_S)

    def look(self) -> None:
        """Looks once."""
        question = self._core.question()
        phase, stack = self._stacks.look()
        self._core.tell(phase, stack, question)
        self._dump_what_is_due()

    def _dumped(self) -> str:
        """Dumps, and says where."""
        where = dumps.folder()
        return "" if where is None else f"dumped to {dumps.dump()}"

    def _seen_failure(self) -> tuple[int, str]:
        return self._core.num_failures(), self._core.job_failure() or ""

    def _dump_what_is_due(self) -> None:
        with self._lock:
            failure, asked = self._seen_failure(), self._core.dumps_asked()
            before, asked_before = self._failure, self._num_asked
            self._failure, self._num_asked = failure, asked
            # Where the job has failed, what fails after that is no news.
            news = 1 if failure[1] else 0
            if failure[news] != before[news]:
                dumps.after_failure(failure[1] or self._core.last_failure())
            elif asked != asked_before:
                logger.warning("jaxcoll: %s", self._dumped() or "no dump: JAXCOLL_DUMP_DIR=none")

    def end(self) -> None:
        """Ends the watch; has the process end as a failed one where work nobody awaited failed."""
        if error := await_steps():
            logger.error("jaxcoll: work that was not awaited has failed: %s", error)
            self._core.end_with(1)
        self._stops.set()
        self.join(_JOIN_S)
        self._dump_what_is_due()


def await_steps() -> str | None:
    """Waits for what was started and is still held; returns why it failed, if nobody knows yet."""
    for array in jax.live_arrays():
        try:
            array.block_until_ready()
        except Exception as error:
            if not errors.was_seen(error) and (text := errors.collective_text(error)):
                return text
    return None
