"""The collectives of a compiled program, as the compiler made them."""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_COLLECTIVE = re.compile(
    r"^(?P<indent> *)\S.* = (?P<result>.*?) (?P<op>all-reduce|all-gather|reduce-scatter|all-to-all"
    r"|collective-permute|collective-broadcast|ragged-all-to-all)(?:-start)?"
    r"\((?P<operands>[^()]*)\)(?P<rest>.*)"
)
_OPCODE = re.compile(
    r" (?:all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
    r"|ragged-all-to-all)(?:-start)?\("
)
_LAYOUT_DETAIL = re.compile(r":[A-Z]+\([\d,]*\)")  # such as the E(2) of {1,0:E(2)}
_SHAPE = re.compile(r"\b([a-z]+[0-9a-z]*)\[([0-9,]*)\]")
_GROUPS = re.compile(r"replica_groups=\{((?:\{[0-9,]*\},?)*)\}")
_METADATA = re.compile(r'metadata=\{op_name="(?P<name>[^"]*)"(?: stack_frame_id=(?P<frame>\d+))?')
_TABLE_LINE = re.compile(r"(\d+) (.*)")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One instruction.

    Attributes:
        op: XLA's name, such as "all-reduce".
        operands: type, as XLA writes it, and number of elements.
        groups: the places in the program's list of devices that communicate; in a permutation all.
        origin: what it is for, and the line that said so: `jit(step)/dot_general at train.py:31`.
    """

    op: str
    operands: tuple[tuple[str, int], ...]
    groups: tuple[tuple[int, ...], ...]
    origin: str


def collectives_of(executable: Any, num_devices: int) -> list[Collective]:
    """Returns the collectives of one of JAX's loaded executables.

    Raises:
        ValueError: it has some that this function does not understand.
    """
    from jaxlib import _hlo

    options = _hlo.HloPrintOptions.fingerprint()  # the one that writes all groups in one way
    options.print_metadata = True
    options.print_large_constants = False
    found: list[Collective] = []
    for module in executable.hlo_modules():
        found.extend(parse(module.to_string(options), num_devices))
    return found


def parse(text: str, num_devices: int) -> Iterator[Collective]:
    """Yields the collectives of a module's text."""
    lines = text.splitlines()
    sources = _sources(lines)
    for i, line in enumerate(lines):
        if _OPCODE.search(line) is None:
            continue
        match = _COLLECTIVE.match(_LAYOUT_DETAIL.sub("", line))
        if match is None:
            raise ValueError(f"a collective that can't be read: {line.strip()}")
        last = line
        if line.endswith("="):  # a function in braces follows, and then the rest
            end = match["indent"] + "}"
            last = next((other for other in lines[i + 1 :] if other.startswith(end)), line)
        yield Collective(
            op=match["op"],
            operands=tuple(
                (dtype, math.prod(int(size) for size in shape.split(",") if size))
                for dtype, shape in _SHAPE.findall(match["operands"])
            ),
            groups=_groups(match["op"], match["rest"], num_devices),
            origin=_origin(last, sources),
        )


def _groups(op: str, rest: str, num_devices: int) -> tuple[tuple[int, ...], ...]:
    everyone = (tuple(range(num_devices)),)
    if op == "collective-permute":
        return everyone
    groups = _GROUPS.search(rest)
    if groups is None or "channel_id=" not in rest:
        raise ValueError(f"{op} whose groups are not those of jit or shard_map: {rest.strip(', ')}")
    found = tuple(
        tuple(int(number) for number in group.split(","))
        for group in re.findall(r"\{([0-9,]+)\}", groups[1])
    )
    return found or everyone


def _sources(lines: Sequence[str]) -> Mapping[str, str]:
    """Returns `file:line` by the number of a stack frame, from the tables at a module's begin."""
    tables: dict[str, dict[str, str]] = {}
    table: dict[str, str] = {}
    for line in lines:
        if line.startswith(("{", "ENTRY", "%")):  # the first function
            break
        if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            table = tables.setdefault(line, {})
        elif match := _TABLE_LINE.fullmatch(line):
            table[match[1]] = match[2]
    places: dict[str, str] = {}
    for number, location in tables.get("FileLocations", {}).items():
        if match := re.match(r"\{file_name_id=(\d+) .*?\bline=(\d+)", location):
            file = tables.get("FileNames", {}).get(match[1], "").strip('"')
            places[number] = f"{file}:{match[2]}"
    return {
        number: places.get(match[1], "")
        for number, frame in tables.get("StackFrames", {}).items()
        if (match := re.match(r"\{file_location_id=(\d+)", frame))
    }


def _origin(line: str, sources: Mapping[str, str]) -> str:
    match = _METADATA.search(line)
    if match is None:
        return ""
    source = sources.get(match["frame"] or "", "")
    return f"{match['name']} at {source}" if source else match["name"]


def bytes_of(dtype: str) -> int:
    """Returns the bytes of an element of one of XLA's types, such as `f32` or `pred`."""
    bits = re.match(r"[a-z]+(\d+)", dtype)
    return 1 if bits is None else -(-int(bits[1]) // 8)
