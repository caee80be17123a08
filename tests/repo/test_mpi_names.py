"""What jaxlib looks up in an MPI library is what ours exports; a new jaxlib must not surprise."""

import ctypes
import pathlib
import re

import pytest

from jaxcoll import _mpi_library

NAMES = pathlib.Path(__file__).parents[2] / "csrc" / "mpi" / "names.inc"


def test_the_table_has_what_jaxlib_looks_up():
    entries = re.sub(r"//.*", "", NAMES.read_text())
    table = re.findall(r"\b(?:CALLED|UNUSED|CONSTANT)\((\w+)\)", entries)
    assert len(table) == len(set(table))
    wanted = {name for name in _mpi_library.looked_up() if name.startswith("MPIABI_")}
    assert wanted, "jaxlib has no interface to MPI any more, or hides it"
    assert wanted == {f"MPIABI_{name}" for name in table}


@pytest.fixture
def library() -> ctypes.CDLL:
    path = _mpi_library.path()
    if path is None:
        pytest.skip("jaxcoll was installed without native code")
    from jaxcoll import _core

    assert _core.connect_mpi(path) == ""
    return ctypes.CDLL(path)


def text_of(library: ctypes.CDLL, error: int) -> str:
    assert error != 0
    text, length = ctypes.create_string_buffer(1024), ctypes.c_int()
    assert library.MPIABI_Error_string(error, text, ctypes.byref(length)) == 0
    assert length.value == len(text.value)
    return text.value.decode()


def test_the_library_has_what_jaxlib_looks_up(library: ctypes.CDLL):
    assert len(_mpi_library.looked_up()) > 600
    assert not _mpi_library.missing_names(library._name)


def test_what_xla_does_not_call_says_so(library: ctypes.CDLL):
    text = text_of(library, library.MPIABI_Bcast())
    assert text.startswith("jaxcoll.CollectiveError: MPI_Bcast: XLA has not called it before")


def test_a_group_that_nobody_has_announced(library: ctypes.CDLL):
    communicator = ctypes.c_void_p()
    world = ctypes.c_void_p.in_dll(library, "MPIABI_COMM_WORLD")
    library.MPIABI_Comm_split(world, 7, 1, ctypes.byref(communicator))
    value = ctypes.c_float(1)
    kinds = [ctypes.c_void_p.in_dll(library, f"MPIABI_{name}") for name in ("FLOAT", "SUM")]
    error = library.MPIABI_Allreduce(
        ctypes.byref(value), ctypes.byref(value), 1, *kinds, communicator
    )
    assert "has not seen: rank 1 of one that begins with device 7." in text_of(library, error)


def test_a_table_of_symbols(tmp_path: pathlib.Path):
    (here,) = (
        line.split()[-1]
        for line in pathlib.Path("/proc/self/maps").read_text().splitlines()
        if line.endswith("/libjax_common.so") and line.split()[2] == "00000000"
    )
    names = ("mpitrampoline_init", "did_init_mpitrampoline", "no such symbol")
    found = _mpi_library.symbol_offsets(here, names)
    assert found.keys() == set(names[:2])
    text = tmp_path / "text"
    text.write_bytes(b"not a library" * 10)
    with pytest.raises(ValueError, match="not an ELF file of 64 bits"):
        _mpi_library.symbol_offsets(str(text), names)
