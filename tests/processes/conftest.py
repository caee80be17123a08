"""Tests of signals hear them, however the suite was started."""

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _hears_signals() -> Iterator[None]:
    """Undoes what nohup and a shell's background ignore, which jobs would inherit."""
    numbers = [n for n in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_IGN]
    for number in numbers:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)
