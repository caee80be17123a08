"""The library that jaxlib takes for its MPI: where it is, and how jaxlib comes to load it.

jaxlib loads the library named by `MPITRAMPOLINE_LIB` once, when it is itself loaded. `jaxcoll run`
sets the variable. In a process that has imported JAX without it, the same function of jaxlib is
called again: it is not exported, but named in the library's table of symbols.
"""

import contextlib
import ctypes
import importlib.util
import mmap
import os
import struct
from pathlib import Path

VARIABLE = "MPITRAMPOLINE_LIB"

# Of jaxlib's copy of MPItrampoline.
_INIT = "mpitrampoline_init"
_DID_INIT = "did_init_mpitrampoline"

# Of ELF files of 64 bits: where the header has the section table, a section's fields, a symbol's.
_HEADER = struct.Struct("<4sBB10x24xQ10xHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_SYMBOL_TABLE = 2


def path() -> str | None:
    """Returns the library's path, or None where jaxcoll was installed without native code."""
    extension = importlib.util.find_spec("jaxcoll._core")  # beside which it was installed
    if extension is None or extension.origin is None:
        return None
    found = Path(extension.origin).parent / "libjaxcoll_mpi.so"
    return str(found) if found.exists() else None


def ensure_loaded(library: str) -> None:
    """Has jaxlib use the library from now on.

    Raises:
        RuntimeError: it can't be had to.
    """
    try:
        shim = ctypes.CDLL(library)
    except OSError as error:
        raise RuntimeError(f"{library} can't be loaded ({error})") from error
    if shim.jaxcoll_mpi_is_in_use():
        return
    if other := os.environ.get(VARIABLE):
        raise RuntimeError(f"{VARIABLE} names another MPI library ({other})")
    _load_late(library)
    if not shim.jaxcoll_mpi_is_in_use():
        raise _too_late("this jaxlib does not load it later")


def missing_names(library: str) -> list[str]:
    """Returns what jaxlib looks up, and ends the process for want of; at most three of them.

    Raises:
        OSError: jaxlib's library can't be read.
    """
    shim = ctypes.CDLL(library)
    missing = [name for name in sorted(looked_up()) if not hasattr(shim, name)]
    return missing[:3]


def looked_up() -> set[str]:
    """Returns the names that jaxlib looks up in an MPI library: strings of its own library."""
    import jaxlib

    file = Path(jaxlib.__file__).parent / "libjax_common.so"
    names: set[str] = set()
    with open(file, "rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for prefix in (b"\0MPIABI_", b"\0MPIXABI_", b"\0mpiabi_version_", b"\0mpiwrapper_"):
            at = 0
            while (at := data.find(prefix, at)) >= 0:
                end = data.find(b"\0", at + 1)
                names.add(data[at + 1 : end].decode())
                at = end
    return names


def _load_late(library: str) -> None:
    try:
        if missing := missing_names(library):
            raise RuntimeError(f"this jaxlib looks for {', '.join(missing)}, which {library} lacks")

        start, jaxlib = next(
            (int(line.split("-")[0], 16), line.split(maxsplit=5)[5].strip())
            for line in Path("/proc/self/maps").read_text().splitlines()
            if line.endswith("/libjax_common.so") and line.split()[2] == "00000000"
        )
        symbols = symbol_offsets(jaxlib, (_INIT, _DID_INIT))
    except (OSError, StopIteration, ValueError, struct.error) as error:
        raise _too_late("jaxlib's libraries can't be read") from error
    if len(symbols) < 2:
        raise _too_late(f"this jaxlib does not tell where its {_INIT} is")
    did_init = ctypes.c_ubyte.from_address(start + symbols[_DID_INIT])
    if did_init.value != 1:
        raise _too_late(f"this jaxlib's {_DID_INIT} is {did_init.value}, not 1")
    did_init.value = 0
    os.environ[VARIABLE] = library
    ctypes.CFUNCTYPE(None)(start + symbols[_INIT])()
    del os.environ[VARIABLE]  # what this process starts has an MPI of its own, if any


def _too_late(why: str) -> RuntimeError:
    return RuntimeError(
        f"JAX was imported before {VARIABLE} was set, and {why}: start the script with `jaxcoll "
        "run --accelerate`"
    )


def symbol_offsets(file: str, names: tuple[str, ...]) -> dict[str, int]:
    """Returns the addresses, from where an ELF library is loaded, of those symbols that it has.

    Raises:
        ValueError: the file is none, or not of this kind.
    """
    with contextlib.ExitStack() as stack:
        handle = stack.enter_context(open(file, "rb"))
        data = stack.enter_context(mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ))
        magic, bits, order, table, size, count, _ = _HEADER.unpack_from(data)
        if (magic, bits, order, size) != (b"\x7fELF", 2, 1, _SECTION.size):
            raise ValueError(f"{file}: not an ELF file of 64 bits")
        sections = [_SECTION.unpack_from(data, table + i * size) for i in range(count)]
        found: dict[str, int] = {}
        for section in sections:
            if section[1] == _SYMBOL_TABLE:
                _, _, _, _, begin, length, link, _, _, _ = section
                strings, strings_length = sections[link][4:6]
                for name in names:
                    at = data.find(b"\0" + name.encode() + b"\0", strings, strings + strings_length)
                    if at >= 0:
                        value = _value_of(data, begin, length, at + 1 - strings)
                        found.update({} if value is None else {name: value})
        return found


def _value_of(data: mmap.mmap, begin: int, length: int, name: int) -> int | None:
    """Returns the value of the symbol whose name is at this place of the string table."""
    key = struct.pack("<I", name)
    at = begin
    while (at := data.find(key, at, begin + length)) >= 0:
        if (at - begin) % _SYMBOL.size == 0:
            return _SYMBOL.unpack_from(data, at)[4]
        at += 1
    return None
