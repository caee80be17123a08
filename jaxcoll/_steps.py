"""Programs that were started and that nobody has awaited yet."""

import contextlib
import threading

import jax


class _Here(threading.local):
    awaits = False


_here = _Here()


def await_steps() -> None:
    """Waits for programs whose results are still held, however they end."""
    _here.awaits = True
    try:
        for array in jax.live_arrays():
            with contextlib.suppress(Exception):
                array.block_until_ready()
    finally:  # an interrupt, say
        _here.awaits = False


def awaits_here() -> bool:
    """Tells whether this thread does so: errors that it gets are not the user's."""
    return _here.awaits
