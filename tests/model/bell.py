"""How a process that sleeps is woken, as in Exchange::Publish and Exchange::Sleep: no lost wake-up.

One process publishes twice, the other sleeps until it has seen both. Each line of the code is a
step.
"""

import dataclasses
from collections.abc import Iterator

from model.explore import explore

RULES = (
    "count, then look",  # the sleeper counts itself before its last look
    "publish, then ask",  # the publisher asks for sleepers after it has published
    "note the bell, then look",  # the sleeper knows the bell's number from before its last look
)


@dataclasses.dataclass(frozen=True)
class State:
    """Where both stand; `noted` is the bell's number that the sleeper sleeps on."""

    published: int = 0
    bell: int = 0
    sleepers: int = 0
    publisher: int = 0
    rings: bool = False
    sleeper: str = "awake"
    seen: int = 0
    noted: int = 0


def run(without: str = "") -> int:
    """Returns the number of states, or raises Violation."""

    def steps(state: State) -> Iterator[tuple[str, State]]:
        yield from _publisher(state, without)
        yield from _sleeper(state, without)

    def check_end(state: State) -> str | None:
        return None if state.sleeper == "done" else "the sleeper sleeps for ever"

    return explore(State(), steps, lambda _: None, check_end)


def _publisher(state: State, without: str) -> Iterator[tuple[str, State]]:
    place = state.publisher % 3
    if state.publisher == 6:
        return
    if without == "publish, then ask" and place < 2:
        place = 1 - place
    new = dataclasses.replace(state, publisher=state.publisher + 1)
    if place == 0:
        yield "publishes", dataclasses.replace(new, published=state.published + 1)
    elif place == 1:
        yield "asks for sleepers", dataclasses.replace(new, rings=state.sleepers > 0)
    else:
        yield "rings", dataclasses.replace(new, bell=state.bell + state.rings)


def _sleeper(state: State, without: str) -> Iterator[tuple[str, State]]:
    order = ["count", "note", "look"]
    if without == "count, then look":
        order = ["note", "look", "count"]
    elif without == "note the bell, then look":
        order = ["count", "look", "note"]
    if state.sleeper == "awake":
        yield "goes to sleep", dataclasses.replace(state, sleeper=order[0])
    elif state.sleeper in order:
        following = [*order, "asleep"][order.index(state.sleeper) + 1]
        new = dataclasses.replace(state, sleeper=following)
        if state.sleeper == "count":
            yield "counts itself", dataclasses.replace(new, sleepers=state.sleepers + 1)
        elif state.sleeper == "note":
            yield "notes the bell", dataclasses.replace(new, noted=state.bell)
        elif state.published > state.seen:
            woken = {"sleepers": 0, "seen": state.published}
            end = "done" if state.published == 2 else "awake"
            yield "sees it", dataclasses.replace(state, sleeper=end, **woken)
        else:
            yield "sees nothing", new
    elif state.sleeper == "asleep" and state.bell != state.noted:
        yield "wakes up", dataclasses.replace(state, sleeper="awake", sleepers=0)
