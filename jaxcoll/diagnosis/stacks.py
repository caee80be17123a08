"""What the threads of this process do in Python, and their stacks as text."""

import dataclasses
import linecache
import os
import sys
import threading
from types import FrameType
from typing import NamedTuple

import jax

from jaxcoll import _native
from jaxcoll.diagnosis import black_box

_JAX = os.path.join(os.path.dirname(jax.__file__), "_src", "")
_OWN = os.path.dirname(os.path.dirname(__file__))
# Of files in jax/_src, by what a frame in them means.
_COMPILES = (
    "compiler.py",
    *(os.path.join("interpreters", name) for name in ("mlir.py", "partial_eval.py")),
)
_CALLS_BACK = ("buffer_callback.py", "callback.py", "python_callback.py")
_AWAITS = ("api.py", "array.py")
_AWAITING = ".block_until_ready("
_NOT_THE_USERS = (
    *(os.path.join(_OWN, name) for name in ("_launched.py", "_watch.py")),
    "<frozen runpy>",
)
_MOST_FRAMES = 16


@dataclasses.dataclass(frozen=True)
class _Frame:
    file: str
    line: int
    function: str

    @property
    def awaits(self) -> bool:
        """Whether its line asks for results; the function that waits is not Python's."""
        return _AWAITING in linecache.getline(self.file, self.line)

    def __str__(self) -> str:
        return f'File "{self.file}", line {self.line}, in {self.function}'


class Look(NamedTuple):
    """What this process does.

    Attributes:
        phase: one of black_box's.
        stack: the main thread's, and those of callbacks.
        callbacks: threads that are in one.
    """

    phase: int
    stack: str
    callbacks: int


def look() -> Look:
    """Looks at all threads."""
    threads = _frames()
    main = threads.pop(threading.main_thread().ident or 0, [])
    phase = _phase_of(main)
    calls_back = [_text_of(f) for f in threads.values() if _phase_of(f) == black_box.CALLBACK]
    stack = "\nin a callback:\n".join([_text_of(main), *calls_back])
    if calls_back and phase == black_box.AWAITING:
        phase = black_box.CALLBACK
    return Look(phase, stack, len(calls_back) + (_phase_of(main) == black_box.CALLBACK))


def all_threads() -> dict[str, str]:
    """Returns the stacks of all threads, by name."""
    named = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        f"{named.get(number, 'of the runtime')} ({number})": _text_of(frames)
        for number, frames in _frames().items()
    }


def _frames() -> dict[int, list[_Frame]]:
    """Returns the frames of each thread, the innermost first.

    Not by faulthandler, which ends Python 3.12 and 3.13 where a thread is between two frames. The
    extension takes them while no thread can go on; what does without it looks rarely.
    """
    core = _native.core()
    if core is not None:
        return {
            thread: [_Frame(*frame) for frame in frames] for thread, frames in core.frames().items()
        }
    return {thread: _walk(top) for thread, top in sys._current_frames().items()}


def _walk(frame: FrameType | None) -> list[_Frame]:
    frames = []
    while frame is not None:
        code = frame.f_code
        frames.append(_Frame(code.co_filename, frame.f_lineno or 0, code.co_name))
        frame = frame.f_back
    return frames


def _phase_of(frames: list[_Frame]) -> int:
    """Returns what a thread does that is at these frames: one of black_box's phases."""
    for frame in frames:
        if frame.file.startswith(_JAX):
            file = frame.file[len(_JAX) :]
            if file in _CALLS_BACK:
                return black_box.CALLBACK
            if file in _COMPILES:
                return black_box.COMPILING
    if frames and (frames[0].file in {_JAX + file for file in _AWAITS} or frames[0].awaits):
        return black_box.AWAITING
    return black_box.PYTHON


def _text_of(frames: list[_Frame]) -> str:
    """Returns a stack as Python prints one, without source lines; of JAX the last two frames."""
    lines = [
        str(frame)
        for i, frame in enumerate(frames)
        if not frame.file.startswith(_NOT_THE_USERS) and (i < 2 or not frame.file.startswith(_JAX))
    ]
    if len(lines) > _MOST_FRAMES:
        lines = [*lines[:_MOST_FRAMES], f"... {len(lines) - _MOST_FRAMES} more"]
    return "\n".join(reversed(lines))
