"""What the threads of this process do in Python, and their stacks as text."""

import ast
import concurrent.futures
import dataclasses
import itertools
import linecache
import os
import re
import selectors
import sys
import sysconfig
import threading
import traceback
from types import FrameType
from typing import NamedTuple

import jax

from jaxcoll import _native
from jaxcoll.diagnosis import black_box

_JAX = os.path.join(os.path.dirname(jax.__file__), "_src", "")
_OWN = os.path.dirname(os.path.dirname(__file__))
_LIBRARIES = (os.path.join(_OWN, ""), os.path.join(os.path.dirname(jax.__file__), ""))
_PYTHON = os.path.join(sysconfig.get_path("stdlib"), "")
# Of files in jax/_src, by what a frame in them means.
_COMPILES = (
    "compiler.py",
    *(os.path.join("interpreters", name) for name in ("mlir.py", "partial_eval.py")),
)
# Inside of these a program runs, whatever JAX was at when it began: gradients outside of `jit`
# evaluate what they take apart.
_EXECUTES = (
    (os.path.join("interpreters", "pxla.py"), "__call__"),
    ("dispatch.py", "apply_primitive"),
)
_CALLS_BACK = ("buffer_callback.py", "callback.py", "python_callback.py")
_AWAITS = ("api.py", "array.py")
_AWAITING = "block_until_ready"
# Who waits for another thread is in one of these: to join it, for an event, for a future's result,
# or in an event loop. Or it looks again and again, or calls what is not Python's.
_WAITS_FOR_THREADS = (
    threading.__file__,
    os.path.dirname(concurrent.futures.__file__),
    selectors.__file__,
)
_SLEEPING = "sleep"
_WAITING = ("acquire", "get")  # of a lock, of a queue
_NOT_THE_USERS = (
    *(
        os.path.join(_OWN, name)
        for name in ("_launched.py", "_steps.py", "_watch.py", os.path.join("diagnosis", ""))
    ),
    "<frozen runpy>",
    "<frozen importlib",
)
_MOST_FRAMES = 16
_MOST_THREADS = 3  # beside the main one where that waits for them
_LONGEST = 200  # of an exception's text


@dataclasses.dataclass(frozen=True)
class _Frame:
    file: str
    line: int
    function: str
    # Of the expression that is evaluated, which begins on that line; in bytes, -1: not known.
    column: int = -1
    end_line: int = -1
    end_column: int = -1

    @property
    def awaits(self) -> bool:
        """Whether its line asks for results now; the function that waits is not Python's."""
        # Where one can't tell which part of the line it is at, it may come to something else yet.
        return self._calls(_AWAITING, unless=_SLEEPING)

    @property
    def waits_for_threads(self) -> bool:
        """Whether its thread may wait for another one, if it is the innermost."""
        if self.file.startswith(_WAITS_FOR_THREADS):
            return True
        return any(map(self._calls, (_SLEEPING, *_WAITING)))

    def _calls(self, function: str, unless: str | None = None) -> bool:
        """Tells whether it is in a call of a function.

        Where Python does not say at which call it is: in one of a line that has no call of another.
        """
        line = linecache.getline(self.file, self.line)
        if not re.search(rf"\b{function}\(", line):
            return False
        called = self._called
        if called is None:
            return unless is None or f"{unless}(" not in line
        return called == function

    @property
    def _called(self) -> str | None:
        """The name of what it calls now, "" where that has none; None where nothing tells."""
        if min(self.column, self.end_line - self.line, self.end_column) < 0:
            return None
        lines = [
            linecache.getline(self.file, number).encode()
            for number in range(self.line, self.end_line + 1)
        ]
        lines[-1] = lines[-1][: self.end_column]
        lines[0] = lines[0][self.column :]
        try:
            called = ast.parse(b"".join(lines), mode="eval").body
        except (SyntaxError, ValueError):  # the file is another one by now
            return None
        function = called.func if isinstance(called, ast.Call) else None
        match function:
            case ast.Attribute():
                return function.attr
            case ast.Name():
                return function.id
        return ""

    def __str__(self) -> str:
        return f'File "{self.file}", line {self.line}, in {self.function}'


class Look(NamedTuple):
    """What this process does.

    Attributes:
        phase: one of black_box's.
        stack: the main thread's, those of callbacks, and of others that compile or await results;
            of other threads of the program where the main one may wait for them.
        callbacks: threads that are in one.
        functions: of the main thread and of those in callbacks, by thread, but for Python's own:
            who polls is in the same ones.
    """

    phase: int
    stack: str
    callbacks: int
    functions: tuple[tuple[int, tuple[str, ...]], ...] = ()


# What others than the main thread do, of which to say more.
_OTHERS = {
    black_box.CALLBACK: "in a callback",
    black_box.COMPILING: "compiling, in another thread",
    black_box.AWAITING: "waiting for results, in another thread",
}


def look(thread: int | None = None) -> Look:
    """Looks at all threads; `thread`, by its identifier, in the place of the main one."""
    threads = _frames()
    main_thread = threading.main_thread().ident or 0
    main = threads.pop(main_thread if thread not in threads else thread, [])
    phase = _phase_of(main)
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    others = [
        (_phase_of(frames), t, frames)
        for t, frames in threads.items()
        if not names.get(t, "").startswith("jaxcoll-")
    ]
    stack = [_text_of(main)]
    for of_others, name in _OTHERS.items():
        stack += [f"{name}:\n{_text_of(frames)}" for of, _, frames in others if of == of_others]
    in_callbacks = {t: frames for of, t, frames in others if of == black_box.CALLBACK}
    callbacks = len(in_callbacks)
    functions = [(t, _functions_of(frames)) for t, frames in sorted(in_callbacks.items())]
    functions.append((main_thread, _functions_of(main)))
    if callbacks and phase == black_box.AWAITING:
        phase = black_box.CALLBACK
    # It may be that thread for which it waits; that takes no longer than a compile.
    if phase == black_box.PYTHON and bool(main) and main[0].waits_for_threads:
        stack += _of_program(
            [(names.get(t, str(t)), frames) for of, t, frames in others if of == black_box.PYTHON]
        )
        if any(of == black_box.COMPILING for of, *_ in others):
            phase = black_box.COMPILING
    callbacks += _phase_of(main) == black_box.CALLBACK
    return Look(phase, "\n".join(filter(None, stack)), callbacks, tuple(functions))


def _of_program(threads: list[tuple[str, list[_Frame]]]) -> list[str]:
    """Returns the stacks of some threads that do something of the program's, each once.

    If there are none, of those that do something of a library's that the program uses.
    """
    threads = [(name, frames) for name, frames in threads if any(map(_is_of_program, frames))]
    own = [
        (name, frames)
        for name, frames in threads
        if any(_is_of_program(frame) and "-packages" not in frame.file for frame in frames)
    ]
    names: dict[str, list[str]] = {}
    for name, frames in own or threads:
        names.setdefault(_text_of(frames), []).append(name)
    texts = []
    for text, alike in names.items():
        more = f" and {len(alike) - 1} more" if len(alike) > 1 else ""
        texts.append(f"in another thread, {alike[0]}{more}:\n{text}")
    if len(texts) > _MOST_THREADS:
        texts[_MOST_THREADS:] = [f"... {len(texts) - _MOST_THREADS} more threads"]
    return texts


def _is_of_program(frame: _Frame) -> bool:
    """Tells whether it is not Python's, JAX's or ours, in which threads wait for work, too."""
    return not (_is_of_python(frame.file) or frame.file.startswith((*_LIBRARIES, "<frozen ")))


def all_threads() -> dict[str, str]:
    """Returns the stacks of all threads, by name."""
    named = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        f"{named.get(number, 'of the runtime')} ({number})": _text_of(frames)
        for number, frames in _frames().items()
    }


def raised(error: BaseException) -> str:
    """Returns what an exception says, in one line, and the user's line that has raised it."""
    said = " ".join(f"{type(error).__name__}: {error}".split())
    frames = [
        _Frame(frame.f_code.co_filename, line, frame.f_code.co_name)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    own = [f for f in frames if not (_is_of_python(f.file) or "-packages" in f.file)]
    where = [f", at {f.file}:{f.line} ({f.function})" for f in (own or frames)[-1:]]
    return "".join([said if len(said) <= _LONGEST else f"{said[:_LONGEST]} ...", *where])


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
        positions = itertools.islice(code.co_positions(), max(frame.f_lasti, 0) // 2, None)
        _, end_line, column, end_column = next(positions, (None,) * 4)
        place = (-1 if part is None else part for part in (column, end_line, end_column))
        frames.append(_Frame(code.co_filename, frame.f_lineno or 0, code.co_name, *place))
        frame = frame.f_back
    return frames


def _phase_of(frames: list[_Frame]) -> int:
    """Returns what a thread does that is at these frames: one of black_box's phases."""
    executes = False
    for frame in frames:
        if frame.file.startswith(_JAX):
            file = frame.file[len(_JAX) :]
            if file in _CALLS_BACK:
                return black_box.CALLBACK
            executes = executes or (file, frame.function) in _EXECUTES
            if file in _COMPILES and not executes:
                return black_box.COMPILING
    if frames and (frames[0].file in {_JAX + file for file in _AWAITS} or frames[0].awaits):
        return black_box.AWAITING
    return black_box.PYTHON


def _functions_of(frames: list[_Frame]) -> tuple[str, ...]:
    """Returns where a thread is as long as it goes on in the same functions, wherever in these."""
    return tuple(f"{f.file} {f.function}" for f in frames if not _is_of_python(f.file))


def _is_of_python(file: str) -> bool:
    return file.startswith(_PYTHON) and "-packages" not in file.removeprefix(_PYTHON)


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
