"""Imports and includes run downwards only, in both languages; and the checker sees when not."""

import pathlib

import pytest
from repo.layering import violations

ROOT = pathlib.Path(__file__).parents[2]

GOOD_TREE = {
    "jaxcoll/__init__.py": "from jaxcoll.collectives import all_reduce\n",
    "jaxcoll/_compat.py": "import jax._src.core\n",
    "jaxcoll/_errors.py": "from jaxcoll import _types\n",
    "jaxcoll/_types.py": "import jax\n\nx: jax.Array\n",
    "jaxcoll/_native.py": "import jax.ffi\nfrom jaxcoll import _core, _errors\n",
    "jaxcoll/_lowering.py": "def f():\n    from jaxcoll import _native\n",
    "jaxcoll/collectives/__init__.py": "from jaxcoll.collectives.all_reduce import all_reduce\n",
    "jaxcoll/collectives/all_reduce.py": "from jaxcoll._lowering import f\n",
    "jaxcoll/parallel/schedules.py": "",
    "jaxcoll/parallel/data.py": "from jaxcoll.collectives.all_reduce import all_reduce\n",
    "jaxcoll/parallel/pipeline.py": "from jaxcoll.parallel import schedules\n",
    "jaxcoll/parallel/plan.py": "from jaxcoll.parallel import data, pipeline\n",
    "csrc/core/types.h": "#include <span>\n",
    "csrc/kernels/reduce.h": '#include "core/types.h"\n',
    "csrc/kernels/reduce_avx2.cc": '#include <immintrin.h>\n#include "kernels/reduce.h"\n',
    "csrc/host/group.h": '#include "kernels/reduce.h"\n',
    "csrc/ffi/all_reduce.cc": '#include "host/group.h"\n#include "xla/ffi/api/ffi.h"\n',
    "csrc/module.cc": '#include <nanobind/nanobind.h>\n#include "xla/ffi/api/ffi.h"\n',
}

# What breaks a rule -> the file that gets it, the line, and what the checker must say.
BAD = {
    "upward": ("jaxcoll/_types.py", "import jaxcoll._native", "_types imports _native"),
    "upward-in-function": (
        "jaxcoll/_types.py",
        "def f():\n    from jaxcoll import mesh, _lowering",
        "_types imports _lowering",
    ),
    "through-the-face": (
        "jaxcoll/parallel/data.py",
        "from jaxcoll import all_reduce",
        "parallel imports __init__",
    ),
    "cycle": ("jaxcoll/_types.py", "from jaxcoll import _errors", "cycle: "),
    "unknown-module": ("jaxcoll/helpers.py", "import os", "helpers is in no layer"),
    "private-jax": ("jaxcoll/_lowering.py", "from jax._src import core", "jax._src.core only in"),
    "private-jax-attribute": (
        "jaxcoll/_lowering.py",
        "import jax\njax._src.core.Primitive",
        "jax._src.core.Primitive only in",
    ),
    "ffi": ("jaxcoll/collectives/all_reduce.py", "from jax import ffi", "jax.ffi only in"),
    "extension": ("jaxcoll/_lowering.py", "from jaxcoll import _core", "jaxcoll._core only in"),
    "parallel-sibling": (
        "jaxcoll/parallel/data.py",
        "from jaxcoll.parallel import pipeline",
        "do not import each other",
    ),
    "cxx-upward": ("csrc/core/types.h", '#include "kernels/reduce.h"', "core imports kernels"),
    "cxx-cycle": ("csrc/host/run.h", '#include "host/run.h"', "cycle: "),
    "cxx-unknown": ("csrc/util/x.h", '#include "core/types.h"', "util is in no layer"),
    "xla": ("csrc/host/group.h", '#include "xla/ffi/api/ffi.h"', "<xla/ffi/api/ffi.h> only in"),
    "python": ("csrc/ffi/x.cc", "#include <Python.h>", "<Python.h> only in"),
    "intrinsics": ("csrc/host/group.h", "#include <immintrin.h>", "<immintrin.h> only in"),
}


def _write(root: pathlib.Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(text)


def test_repository_obeys_its_layers():
    assert violations(ROOT) == []


def test_good_tree_passes(tmp_path: pathlib.Path):
    _write(tmp_path, GOOD_TREE)
    assert violations(tmp_path) == []


@pytest.mark.parametrize("name", BAD)
def test_bad_tree_fails(tmp_path: pathlib.Path, name: str):
    file, line, message = BAD[name]
    _write(tmp_path, GOOD_TREE | {"jaxcoll/mesh.py": ""})
    _write(tmp_path, {file: line + "\n"})
    assert any(message in violation for violation in violations(tmp_path)), violations(tmp_path)


def test_type_checking_imports_do_not_count(tmp_path: pathlib.Path):
    guarded = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import jaxcoll.nn\n"
    _write(tmp_path, GOOD_TREE | {"jaxcoll/nn.py": ""})
    _write(tmp_path, {"jaxcoll/_types.py": guarded})
    assert violations(tmp_path) == []
