"""The thread that looks after this process, so that others can say what it does.

Several times a second it notes in the black box what the main thread does, and its stack; it
answers those that ask, and writes a dump when a call has failed, before the program learns of it
(csrc/host/witness.h), or when it is asked for one.
"""

import atexit
import functools as ft
import os
import sys
import threading
import time
from typing import Any

from jaxcoll import _compat, _cuda, _native
from jaxcoll._config import config, logger
from jaxcoll._steps import await_steps
from jaxcoll.diagnosis import black_box, dumps, errors, stacks
from jaxcoll.diagnosis.standstill import Standstill
from jaxcoll.diagnosis.withheld import Withheld

_PERIOD_S = 0.2
_FIRST_PERIOD_S = 0.01
_JOIN_S = 2.0
# What a program computes between two calls, at most, if the end of a process is to wait for it.
_GAP_S = 0.05
_UNAWAITED = "work that was not awaited has failed"
# The limit of calls in a process that somebody has interrupted, who wants it to end.
_AT_ONCE_S = 1e-3


def start() -> None:
    """Looks after this process from now on; without the extension it does nothing."""
    _started()


def forget_failures() -> None:
    """Has what has failed so far make the process's end no error."""
    if (watcher := _started()) is not None:
        watcher.forget_failures()


def note_end(error: BaseException) -> None:
    """Has this process, if it is looked after, tell the others which exception ends it."""
    if _started.cache_info().currsize and (watcher := _started()) is not None:
        watcher.note_end(error)


@ft.cache
def _started() -> "_Watcher | None":
    core = _native.core()
    if core is None:
        return None
    watcher = _Watcher(core)
    _compat.on_runtime_error(lambda text: errors.note_raised(text, core.num_failures()))
    _compat.on_callback_error(lambda error: core.note_callback_error(stacks.raised(error)))
    watcher.start()
    atexit.register(watcher.end)
    return watcher


class _Watcher(threading.Thread):
    def __init__(self, core: Any) -> None:
        super().__init__(name="jaxcoll-diagnosis", daemon=True)
        self._core = core
        self._failure = self._seen_failure()
        self._num_asked = core.dumps_asked()
        self._num_on_gpus = len(_cuda.failures())
        self._pid = os.getpid()
        self._standstill = Standstill()
        self._withheld = Withheld()
        self._lock = threading.Lock()
        self._ended_with = ""
        core.dump_on_signal()
        dumps.tell_engine()

    def run(self) -> None:
        period_s = _FIRST_PERIOD_S
        while self._core.await_failure(period_s):
            self.look()
            period_s = min(2 * period_s, _PERIOD_S)

    def look(self) -> None:
        """Looks once; lets the errors go that wait for that."""
        num_failures = self._core.num_failures()
        try:
            with self._lock:
                self._look()
        except Exception:  # the next look may succeed
            logger.warning("jaxcoll: this process's diagnosis failed", exc_info=True)
        finally:
            self._core.note_look(num_failures)

    def _look(self) -> None:
        question = self._core.question()
        seen = stacks.look()
        ends = f"ends with {self._ended_with}" if self._ended_with else ""
        stack = "\n".join(filter(None, (ends, seen.stack)))
        # Such a call shows in no frame, and those before it can be of JAX's tracing.
        may_call = seen.phase in (black_box.PYTHON, black_box.COMPILING)
        is_calling = may_call and self._core.is_calling()
        phase = black_box.CALLING if is_calling else seen.phase
        self._core.tell(phase, stack, seen.callbacks, question)
        self._dump_what_is_due()
        now = time.monotonic()
        withheld = self._withheld.look(seen, now)
        if (text := self._standstill.look(seen, now)) is None or withheld is not None:
            text = withheld
        if withheld is not None:
            self._standstill.note_told()
        if text is not None:
            logger.error("%s\n%s", text, self._dumped(text))

    def _dumped(self, report: str = "") -> str:
        """Dumps, and says where; `report`: what has been reported, its first line stays."""
        if dumps.folder() is None:
            return ""
        file = dumps.of_report(report.partition("\n")[0]) if report else dumps.dump()
        return f"dumped to {file}"

    def _seen_failure(self) -> tuple[int, str]:
        return self._core.num_failures(), self._core.job_failure() or ""

    def _dump_what_is_due(self) -> None:
        failure, asked = self._seen_failure(), self._core.dumps_asked()
        before, asked_before = self._failure, self._num_asked
        self._failure, self._num_asked = failure, asked
        on_gpus = _cuda.failures()[self._num_on_gpus :]
        self._num_on_gpus += len(on_gpus)
        of_engine = self._core.failures(before[0])
        for text in of_engine:
            errors.note_unseen(text, failure[0])
        for text in on_gpus:
            errors.note_unseen(text)
        # Where the job has failed, what fails after that is no news.
        news = 1 if failure[1] else 0
        if failure[news] != before[news] or on_gpus:
            dumps.after_failure(failure[1] or "".join([*of_engine, *on_gpus][-1:]))
        elif asked != asked_before:
            logger.warning("jaxcoll: %s", self._dumped() or "no dump: JAXCOLL_DUMP_DIR=none")

    def forget_failures(self) -> None:
        """Looks, and takes what there is for known."""
        with self._lock:
            self._look()
            errors.forget()
            self._num_on_gpus = len(_cuda.failures())

    def note_end(self, error: BaseException) -> None:
        """Keeps the text of an exception that ends this process, not the exception."""
        try:
            self._ended_with = stacks.raised(error)
        except Exception:  # its text is the user's code
            self._ended_with = type(error).__name__

    def _await_open_calls(self) -> None:
        """Waits until this process has not been in a call for a while, at most until deadlines."""
        box = black_box.own()
        if box is None or config.timeout_s is None or not len(box.calls()):
            return
        last_open = time.monotonic()
        until = last_open + config.timeout_s + _JOIN_S
        while (now := time.monotonic()) < min(until, last_open + _GAP_S):
            if (box.calls()["resumed"] == 0).any():
                last_open = now
            time.sleep(_FIRST_PERIOD_S)

    def end(self) -> None:
        """Ends the watch; has the process end as a failed one where work nobody awaited failed."""
        if os.getpid() != self._pid:  # a forked child, whose end is not the process's
            return
        interrupted = is_interrupted()
        if (error := _last_error()) is not None and not self._ended_with:
            self.note_end(error)
        if interrupted:
            config.timeout_s = config.compile_timeout_s = _AT_ONCE_S
        await_steps()
        self._await_open_calls()
        self._core.stop_looks()
        self.join(_JOIN_S)
        self.look()
        self._core.tell(black_box.ENDED, self._ended_with, 0, self._core.question())
        unseen = errors.unseen()
        what = "this process was interrupted in" if interrupted else _UNAWAITED
        for text in unseen:
            logger.error("jaxcoll: %s: %s", what, text)
        self._core.end_watch(bool(unseen), self._failure[0])


def is_interrupted() -> bool:
    """Tells whether Ctrl-C is why the program ends."""
    return isinstance(_last_error(), KeyboardInterrupt)


def _last_error() -> BaseException | None:
    """Returns the exception that ends the program, if any; at a prompt it may be long ago."""
    return None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
