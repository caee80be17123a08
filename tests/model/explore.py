"""Visits every state that a set of processes can reach, whatever the order of their steps."""

from collections.abc import Callable, Hashable, Iterable
from typing import Any


class ViolationError(AssertionError):
    """A rule was broken; the text ends with the steps that lead there."""


def explore(
    start: Hashable,
    steps: Callable[[Any], Iterable[tuple[str, Any]]],
    check: Callable[[Any], str | None],
    check_end: Callable[[Any], str | None],
) -> int:
    """Returns the number of states that can be reached from `start`.

    Args:
        start: the first state.
        steps: the named steps that are possible in a state, and where each leads; a step may raise
            ViolationError.
        check: says what is wrong with a state, or None.
        check_end: the same for a state in which no step is possible.

    Raises:
        ViolationError: a state is wrong.
    """
    came_from: dict[Any, tuple[Any, str] | None] = {start: None}
    waiting = [start]
    while waiting:
        state = waiting.pop()
        try:
            successors = list(steps(state))
            problem = check(state) or (None if successors else check_end(state))
            if problem:
                raise ViolationError(problem)
        except ViolationError as violation:
            raise ViolationError(
                f"{violation}, after: {', '.join(_path(came_from, state))}"
            ) from None
        for name, successor in successors:
            if successor not in came_from:
                came_from[successor] = (state, name)
                waiting.append(successor)
    return len(came_from)


def _path(came_from: dict[Any, tuple[Any, str] | None], state: Any) -> list[str]:
    names = []
    while (step := came_from[state]) is not None:
        state, name = step
        names.append(name)
    return names[::-1]
