"""Programs that were started and that nobody has awaited yet."""

import jax


def await_steps() -> list[Exception]:
    """Waits for programs whose results are still held; returns why some failed."""
    failures: list[Exception] = []
    for array in jax.live_arrays():
        try:
            array.block_until_ready()
        except Exception as error:
            failures.append(error)
    return failures
