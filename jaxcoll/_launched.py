"""What `jaxcoll run` starts for each rank: joins the job, then runs the script as `__main__`."""

import os
import runpy
import select
import sys
import types

from jaxcoll import _initialize, _mpi_library
from jaxcoll._environment import ACCELERATE, TRACE
from jaxcoll._job import PIPES
from jaxcoll.diagnosis import trace, watcher


def main() -> None:
    """Runs `script arguments...` or `-m module arguments...`, as Python itself would."""
    up = _adopt_pipes()
    _initialize.initialize()
    if path := os.environ.pop(TRACE, None):
        trace.follow(path)
    # A process that this one starts is not this rank, whatever it inherits.
    os.environ.pop("JAXCOLL_COORDINATOR", None)
    if os.environ.pop(ACCELERATE, None):
        os.environ.pop(_mpi_library.VARIABLE, None)  # jaxlib has loaded it
    os.write(up, b"1")
    os.close(up)

    is_module = sys.argv[1] == "-m"
    sys.argv = sys.argv[2:] if is_module else sys.argv[1:]
    program = sys.argv[0]
    if not sys.flags.safe_path:  # the launcher's folder, from `python -m`
        del sys.path[0]
    if not os.environ.get("PYTHONSAFEPATH"):
        sys.path.insert(0, os.getcwd() if is_module else os.path.dirname(os.path.realpath(program)))
    try:
        if is_module:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(program, run_name="__main__")
    except SystemExit as error:
        if error.code not in (None, 0):
            _initialize.leave_at_once()
            watcher.note_end(error)
        raise
    except Exception as error:
        _initialize.leave_at_once()
        watcher.note_end(error)
        error.__traceback__ = _below_us(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


def _adopt_pipes() -> int:
    """Keeps the launcher's pipes from what this process starts; returns the one to answer on."""
    life, up = map(int, os.environ.pop(PIPES).split())
    os.set_inheritable(life, False)
    os.set_inheritable(up, False)
    poll = select.poll()
    poll.register(life, 0)
    if poll.poll(0):  # the launcher died before it could bind us to its life
        sys.exit(1)
    return up


def _below_us(traceback: types.TracebackType | None) -> types.TracebackType | None:
    """Returns the part of a traceback that is the script's, or all where there is none."""
    part = traceback
    while part is not None and part.tb_frame.f_code.co_filename in (
        __file__,
        runpy.__file__,
        "<frozen runpy>",
    ):
        part = part.tb_next
    return part or traceback


if __name__ == "__main__":
    main()
