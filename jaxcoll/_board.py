"""Notes between the processes of a job, through JAX's coordination service.

For what is said seldom: each note costs a message to the service, and each reader another.
"""

import json
from collections.abc import Sequence
from typing import Any

from jaxcoll import _compat
from jaxcoll._config import config

_PATIENCE_S = 3600


class Board:
    """Where each of several processes pins a note that all of them read."""

    def __init__(self, call: str, prefix: str, process: int, processes: Sequence[int]) -> None:
        """Takes who takes part, and a prefix that no other board has."""
        self._call = call
        self._prefix = prefix
        self._process = process
        self._processes = processes
        self._client = _compat.distributed_client()

    def exchange(self, topic: str, note: Any) -> list[Any]:
        """Returns the notes of all processes, in their order."""
        folder = f"{self._prefix}/{topic}"
        self._client.key_value_set(
            f"{folder}/{self._process}", json.dumps(note), allow_overwrite=True
        )
        return [self._read(folder, process) for process in self._processes]

    def _read(self, folder: str, process: int) -> Any:
        seconds = _PATIENCE_S if config.timeout_s is None else config.timeout_s
        try:
            note = self._client.blocking_key_value_get(f"{folder}/{process}", int(1000 * seconds))
        except Exception as error:  # of jaxlib's making, one type for all that goes wrong
            raise RuntimeError(
                f"{self._call}(): process {process} did not come within {seconds:g} s. All "
                f"processes of the job must call it. ({str(error).splitlines()[0]})"
            ) from error
        return json.loads(note)
