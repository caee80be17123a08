"""The local processes of a job: started, labelled, watched and ended together. Linux only.

It knows nothing of JAX: a rank is any command. Everything happens in one thread, which waits for
output, for the end of a process and for signals at once, so lines can't mix and nothing races.
"""

import contextlib
import dataclasses
import fcntl
import functools as ft
import io
import math
import os
import re
import select
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

# Tells a rank its ends of two pipes: the one that kills it, and the one to say on that it is up.
PIPES = "_JAXCOLL_PIPES"

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Asks ranks for a dump; to the launcher it asks all of them.
_DUMPING = signal.SIGUSR2
_LINE_ENDS = re.compile(rb"(?<=\n)|(?<=\r)(?!\n|\Z)")
# Longer lines are cut: a rank that never ends its line must not fill the memory.
_LONGEST_LINE = 1 << 20
# For what was written last, where something that left its rank's group still holds the pipe.
_DRAIN_S = 1.0

Stream = io.RawIOBase | io.BytesIO


@dataclasses.dataclass(frozen=True)
class Rank:
    """One process: its number in the whole job, what to run, and where."""

    number: int
    command: Sequence[str]
    environment: Mapping[str, str]
    cpus: frozenset[int] | None = None


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Attributes:
        code: for the shell: that of the rank that failed first; 128 + the signal for a signal.
        text: which rank failed first and how, whether its error may be about another one, and which
            did not end by themselves after that; or what ended the job; None if nothing did.
        may_restart: a rank failed, and not at the start.
    """

    code: int
    text: str | None
    may_restart: bool


class Signals:
    """Turns the signals that a job hears, and the death of a process, into bytes of a pipe.

    A signal that is ignored where the launcher starts, as by `nohup`, stays ignored.
    """

    def __enter__(self) -> "Signals":
        self.pipe, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._old_pipe = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._old = {
            number: signal.signal(number, lambda *_: None)
            for number in (signal.SIGCHLD, _DUMPING, *_ENDING)
            if number == signal.SIGCHLD or signal.getsignal(number) is not signal.SIG_IGN
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_pipe)
        os.close(self.pipe)
        os.close(self._write)


class _Lines:
    """Passes on what a rank writes, in whole lines with a label.

    A carriage return ends a line too, as a progress bar means it, and is passed on as it is.
    """

    def __init__(
        self, label: bytes, write: Callable[[bytes], None], mark: bytes | None = None
    ) -> None:
        self._label = label
        self._write = write
        self._mark = mark
        self._rest = b""
        self.has_mark = False  # in a line so far

    def read(self, pipe: int) -> bool:
        """Reads once; returns whether more can come."""
        data = os.read(pipe, 1 << 16)
        *lines, self._rest = _LINE_ENDS.split(self._rest + data)
        if len(self._rest) > _LONGEST_LINE:
            lines, self._rest = [*lines, self._rest + b"\n"], b""
        if lines:
            self.has_mark |= self._mark is not None and any(self._mark in line for line in lines)
            self._write(b"".join(self._label + line for line in lines))
        return bool(data)

    def close(self) -> None:
        """Writes the last line, if nothing ended it."""
        if self._rest:
            self._write(self._label + self._rest.removesuffix(b"\r") + b"\n")


class Job:
    """The ranks of one host, for one run.

    Args:
        ranks: what to start.
        out: unbuffered; where the standard output of all ranks goes, each line with its rank.
        err: the same for their standard error.
        own_s: after a failure, how long the others have for an error of their own.
        end_s: how long ranks have to end after a signal, before a stronger one.
        mark: what a rank writes to its standard error in errors that may be about other ranks.
    """

    def __init__(
        self,
        ranks: Sequence[Rank],
        out: Stream,
        err: Stream,
        *,
        own_s: float = 3.0,
        end_s: float = 5.0,
        mark: bytes | None = None,
    ) -> None:
        self._ranks = ranks
        self._streams = (out, err)
        self._own_s = own_s
        self._end_s = end_s
        self._mark = mark
        self._selector = selectors.DefaultSelector()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._running: set[int] = set()
        self._not_up = {rank.number for rank in ranks}
        self._lines: list[_Lines] = []
        self._errors: dict[int, _Lines] = {}
        self._done: list[int] = []  # ranks that have ended well, before any failed
        self._first: int | None = None  # the rank that failed first, if it ended by itself
        self._open: list[int] = []
        self._plan: list[tuple[float, signal.Signals]] = []  # what to send when
        self._failed: tuple[int, str] | None = None  # exit code and text
        self._own_until = math.inf  # when the others' time for errors of their own is over
        self._left: set[int] = set()  # ranks that another one's failure did not end in time
        self._ended: tuple[int, str] | None = None

    def run(self, signals: Signals) -> Outcome:
        """Starts all ranks and returns when they have ended, and what they left in their groups.

        Raises:
            OSError: a rank could not be started; those before it are gone again.
        """
        self._selector.register(signals.pipe, selectors.EVENT_READ, self._on_signals)
        try:
            for rank in self._ranks:
                self._start(rank)
            while self._running:
                self._dispatch(self._plan[0][0] if self._plan else None)
                self._look_for_the_dead()
                self._follow_plan()
            self._kill_groups()
            self._selector.unregister(signals.pipe)
            deadline = time.monotonic() + _DRAIN_S
            while self._selector.get_map() and time.monotonic() < deadline:
                self._dispatch(deadline)
            for lines in self._lines:
                lines.close()
        finally:
            self._kill_groups()
            self._close()
        code, text = self._ended or self._failed or (0, None)
        if self._ended is None and self._first is not None and self._errors[self._first].has_mark:
            text = f"{text}; its error, above, may be about another rank"
            if self._done:
                text = f"{text}; ended before: rank {', '.join(map(str, sorted(self._done)))}"
        if self._left:
            left = ", ".join(map(str, sorted(self._left)))
            text = f"{text}; still there {self._own_s:g} s later: rank {left}"
        return Outcome(code, text, not (self._ended or self._not_up) and text is not None)

    def _start(self, rank: Rank) -> None:
        life, held = os.pipe()
        up, told = os.pipe()
        self._open += [life, held, up, told]
        # The kernel kills the group when the launcher's end closes, however the launcher ends.
        fcntl.fcntl(life, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)
        ours = os.sched_getaffinity(0)
        try:
            if rank.cpus is not None:  # of this thread, whose child inherits it
                os.sched_setaffinity(0, rank.cpus)
            process = subprocess.Popen(
                rank.command,
                env={**rank.environment, PIPES: f"{life} {told}"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(life, told),
                start_new_session=True,
            )
        finally:
            os.sched_setaffinity(0, ours)
        self._processes[rank.number] = process
        self._running.add(rank.number)
        fcntl.fcntl(life, fcntl.F_SETOWN, -process.pid)
        for end in (life, told):
            self._open.remove(end)
            os.close(end)
        self._selector.register(up, selectors.EVENT_READ, ft.partial(self._on_up, rank.number))
        width = len(str(max(rank.number for rank in self._ranks)))
        for pipe, to in zip((process.stdout, process.stderr), self._streams, strict=True):
            assert pipe is not None
            write = ft.partial(self._write, to)
            lines = _Lines(b"[%*d] " % (width, rank.number), write, self._mark)
            self._lines.append(lines)
            self._errors[rank.number] = lines  # the last of the two: standard error
            self._selector.register(pipe, selectors.EVENT_READ, lines.read)

    def _dispatch(self, until: float | None) -> None:
        """Waits for something to happen, until a time at most, and handles it."""
        timeout = None if until is None else max(0.0, until - time.monotonic())
        for key, _ in self._selector.select(timeout):
            if not key.data(key.fd):
                self._selector.unregister(key.fileobj)

    def _on_signals(self, pipe: int) -> bool:
        for number in os.read(pipe, 1 << 12):
            if number in _ENDING:
                self._end(signal.Signals(number))
                self._follow_plan()
            elif number == _DUMPING:
                for rank in self._running:
                    if _catches(self._processes[rank].pid, number):
                        os.kill(self._processes[rank].pid, number)
        return True

    def _on_up(self, number: int, pipe: int) -> bool:
        if os.read(pipe, 1):
            self._not_up.discard(number)
        return False

    def _write(self, to: Stream, data: bytes) -> None:
        left = memoryview(data)
        try:
            while left:
                written = to.write(left)
                if written is None:  # somebody has made it non-blocking
                    select.select([], [to], [])
                left = left[written or 0 :]
        except BrokenPipeError:  # as in `jaxcoll run ... | head`
            if self._ended is None:
                self._end(signal.SIGPIPE)

    def _end(self, number: signal.Signals) -> None:
        """Ends the job because of a signal to the launcher; another one hurries."""
        if self._plan:
            early = self._plan[0][0] - time.monotonic()
            self._plan = [(when - early, what) for when, what in self._plan]
            return
        if self._ended is None and self._failed is None:
            self._ended = (128 + number, f"ended by {number.name}")
        steps = [signal.SIGTERM, signal.SIGKILL]
        self._send_later(0.0, [number, *steps] if number == signal.SIGINT else steps)

    def _send_later(self, wait_s: float, steps: Sequence[signal.Signals]) -> None:
        start = time.monotonic() + wait_s
        self._plan = [(start + i * self._end_s, step) for i, step in enumerate(steps)]

    def _follow_plan(self) -> None:
        while self._plan and self._plan[0][0] <= time.monotonic():
            _, number = self._plan.pop(0)
            # Only at the first step, and not if a signal hurried it.
            if number == signal.SIGTERM and self._own_until <= time.monotonic():
                self._left |= self._running
            for rank in self._running:
                # A terminal sends Ctrl-C to the whole group; to end in order, a rank must
                # still have the processes that it started.
                send = os.kill if number == signal.SIGTERM else os.killpg
                send(self._processes[rank].pid, number)

    def _look_for_the_dead(self) -> None:
        failed: list[tuple[bool, int, int]] = []
        for number in sorted(self._running):
            # The process is left as a zombie, so that the number of its group stays its own.
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            state = os.waitid(os.P_PID, self._processes[number].pid, options)
            if state is None:
                continue
            self._running.remove(number)
            if state.si_status != 0:
                failed.append((state.si_code == os.CLD_EXITED, number, state.si_status))
            elif self._failed is None:
                self._done.append(number)
        if failed and self._failed is None and self._ended is None:
            # One that was killed did not die of another's failure.
            has_exited, number, status = min(failed)
            how = f"exit code {status}" if has_exited else f"killed by {_name(status)}"
            code = status if has_exited else 128 + status
            self._first = number if has_exited else None
            self._failed = (code, f"rank {number} failed first: {how}")
            self._own_until = time.monotonic() + self._own_s
            self._send_later(self._own_s, [signal.SIGTERM, signal.SIGKILL])

    def _kill_groups(self) -> None:
        """Kills what is left of all groups, after which their numbers may be another's."""
        for process in self._processes.values():
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _close(self) -> None:
        self._selector.close()
        for process in self._processes.values():
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
        for end in self._open:
            os.close(end)
        self._open.clear()


def _catches(pid: int, number: int) -> bool:
    """Tells whether a process, which may be starting or ending, handles a signal."""
    try:
        with open(f"/proc/{pid}/status") as file:
            caught = next((line.split()[1] for line in file if line.startswith("SigCgt:")), "0")
    except OSError:
        return False
    return bool(int(caught, 16) >> (number - 1) & 1)


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
