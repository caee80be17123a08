"""What the threads of this process do in Python, and their stacks as text."""

import dataclasses
import faulthandler
import linecache
import os
import re
import sys
import tempfile
import threading

import jax

from jaxcoll.diagnosis import black_box


def _as_written(path: str) -> str:
    """Returns a path as faulthandler writes it."""
    return path.encode("ascii", "backslashreplace").decode()


_JAX = _as_written(os.path.join(os.path.dirname(jax.__file__), "_src", ""))
_OWN = _as_written(os.path.dirname(os.path.dirname(__file__)))
# Of files in jax/_src, by what a frame in them means.
_COMPILES = (
    "compiler.py",
    *(os.path.join("interpreters", name) for name in ("mlir.py", "partial_eval.py")),
)
_CALLS_BACK = ("callback.py", "python_callback.py")
_AWAITS = ("api.py", "array.py")
_AWAITING = ".block_until_ready("
_NOT_THE_USERS = (os.path.join(_OWN, "_launched.py"), "<frozen runpy>")
_MOST_FRAMES = 16

_THREAD = re.compile(r"(?:Thread|Current thread) 0x([0-9a-f]+).* \(most recent call first\):")
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')


@dataclasses.dataclass(frozen=True)
class _Frame:
    file: str
    line: str
    function: str

    @property
    def awaits(self) -> bool:
        """Whether its line asks for results; the function that waits is not Python's."""
        return self.line.isdigit() and _AWAITING in linecache.getline(self.file, int(self.line))

    def __str__(self) -> str:
        return f'File "{self.file}", line {self.line}, in {self.function}'


class Stacks:
    """Takes stacks.

    Not by `sys._current_frames`: while Python code walks the frames of another thread, that thread
    may go on; faulthandler takes them in one go.
    """

    def __init__(self) -> None:
        if sys.platform == "linux":
            memory = os.memfd_create("jaxcoll-stacks", os.MFD_CLOEXEC)
            self._file = open(memory, "r+b", buffering=0)  # noqa: SIM115  (as long as this object)
        else:
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115

    def _take(self) -> dict[int, list[_Frame]]:
        """Returns the frames of each thread, the innermost first."""
        self._file.seek(0)
        self._file.truncate()
        faulthandler.dump_traceback(self._file, all_threads=True)
        self._file.seek(0)
        text = self._file.read().decode(errors="replace")
        threads: dict[int, list[_Frame]] = {}
        frames: list[_Frame] = []
        for line in text.splitlines():
            if found := _THREAD.match(line):
                frames = threads.setdefault(int(found[1], 16), [])
            elif found := _FRAME.match(line):
                frames.append(_Frame(*found.groups()))
        return threads

    def look(self) -> tuple[int, str]:
        """Returns what this process does (one of black_box's phases), and its stack.

        That is the main thread's, and those of callbacks.
        """
        threads = self._take()
        main = threads.pop(threading.main_thread().ident or 0, [])
        phase, text = _phase_of(main), _text_of(main)
        for frames in threads.values():
            if _phase_of(frames) == black_box.CALLBACK:
                text += f"\nin a callback:\n{_text_of(frames)}"
                phase = black_box.CALLBACK if phase == black_box.AWAITING else phase
        return phase, text

    def all_threads(self) -> dict[str, str]:
        """Returns the stacks of all threads, by name."""
        named = {thread.ident: thread.name for thread in threading.enumerate()}
        return {
            f"{named.get(number, 'of the runtime')} ({number})": _text_of(frames)
            for number, frames in self._take().items()
        }


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
        if i < 2 or not frame.file.startswith((_JAX, *_NOT_THE_USERS))
    ]
    if len(lines) > _MOST_FRAMES:
        lines = [*lines[:_MOST_FRAMES], f"... {len(lines) - _MOST_FRAMES} more"]
    return "\n".join(reversed(lines))
