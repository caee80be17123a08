"""Notes between the processes of a job, through JAX's coordination service.

For what is said seldom: each note costs a message to the service, and each reader another.
"""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jaxcoll import _compat
from jaxcoll._config import config
from jaxcoll._host import has_ended

_PATIENCE_S = 3600
# How often to look whether who is waited for is still there: at first, and later.
_FIRST_LOOK_S, _LOOK_S = 0.5, 5.0


class Board:
    """Where each of several processes pins a note that all of them read."""

    def __init__(self, call: str, prefix: str, process: int, processes: Sequence[int]) -> None:
        """Takes who takes part, and a prefix that no other board has."""
        self._call = call
        self._prefix = prefix
        self._process = process
        self._processes = processes
        self._client = _compat.distributed_client()
        self._pids: Mapping[int, int] = {}

    def watch(self, pids: Mapping[int, int]) -> None:
        """Takes the pids of processes of this host, whose end is then noticed."""
        self._pids = pids

    def exchange(self, topic: str, note: Any) -> list[Any]:
        """Returns the notes of all processes, in their order."""
        for process in self._pids:
            self._check_lives(process)
        folder = f"{self._prefix}/{topic}"
        self._client.key_value_set(
            f"{folder}/{self._process}", json.dumps(note), allow_overwrite=True
        )
        return [self._read(folder, process) for process in self._processes]

    def moment(self, topic: str) -> int:
        """Returns what this process's clock shows when a note comes, as it does to all at once.

        In nanoseconds, as `time.monotonic_ns`; as exact as a message takes. All processes call it.
        """
        folder, first = f"{self._prefix}/{topic}", self._processes[0]
        if self._process == first:
            self._client.key_value_set(f"{folder}/{first}", "0", allow_overwrite=True)
        self._read(folder, first)
        return time.monotonic_ns()

    def _read(self, folder: str, process: int) -> Any:
        seconds = _PATIENCE_S if config.timeout_s is None else config.timeout_s
        until = time.monotonic() + seconds
        patience = _FIRST_LOOK_S
        while True:
            left = max(until - time.monotonic(), 0.001)
            try:
                return json.loads(
                    self._client.blocking_key_value_get(
                        f"{folder}/{process}", int(1000 * min(left, patience)) + 1
                    )
                )
            except Exception as error:  # of jaxlib's making, one type for all that goes wrong
                self._check_lives(process)
                is_late = "DEADLINE_EXCEEDED" in str(error)
                if is_late and time.monotonic() < until:
                    patience = min(2 * patience, _LOOK_S)
                    continue
                why = "" if is_late else f" ({str(error).splitlines()[0]})"
                raise RuntimeError(
                    f"{self._call}(): process {process} did not come within {seconds:g} s. All "
                    f"processes of the job must call it.{why}"
                ) from None

    def _check_lives(self, process: int) -> None:
        pid = self._pids.get(process)
        if pid is not None and has_ended(pid):
            # Neither the service's error nor that which the caller deals with says more.
            raise RuntimeError(
                f"{self._call}(): process {process} (pid {pid}) has ended, and no other can take "
                "its place in this job: start the whole job anew, from its last checkpoint, as "
                "`jaxcoll run --max-restarts` does."
            ) from None
