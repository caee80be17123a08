"""With only jax and numpy: the core works, and every other name says what to install."""

import pathlib
import subprocess
import sys

import pytest

import jaxcoll
import jaxcoll.models
import jaxcoll.nnx

WITHOUT_FLAX = {
    *("CollectiveError", "DeviceMeshManager", "DevicePlacement", "Info", "NativeUnavailableError"),
    *("ErrorInfo", "MismatchedCall", "MissingRank", "allow_pause", "dump", "error_info", "trace"),
    *("Report", "accelerate_lax", "all_gather", "all_gather_matmul", "all_reduce", "all_to_all"),
    *("broadcast", "config", "explain", "info", "initialize", "make_mesh", "models", "nnx"),
    *("MixedPrecisionPolicy", "PipelineSchedule", "describe", "draw", "optax", "partition_layers"),
    *("matmul_reduce_scatter", "ppermute", "reduce_scatter", "reset", "simulate_cpu_devices"),
    *("clip_by_global_norm", "global_norm", "using", "vocab_parallel_cross_entropy", "watch"),
}

# Imports as if these were not installed.
BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked())
import jaxcoll, jaxcoll.models, jaxcoll.nnx, jaxcoll.optax
for module in (jaxcoll, jaxcoll.models, jaxcoll.nnx, jaxcoll.optax):
    for name in set(module.__all__) - {{"__version__"}}:
        try:
            getattr(module, name)
        except ModuleNotFoundError as error:
            print(module.__name__, name, error, sep="|")
"""


@pytest.mark.parametrize("blocked", [("flax",), ("optax",), ("orbax",)])
def test_names_say_what_to_install(blocked: tuple[str, ...], tmp_path: pathlib.Path):
    script = tmp_path / "blocked.py"
    script.write_text(BLOCKED.format(blocked=blocked))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    missing = [line.split("|") for line in done.stdout.splitlines()]
    for module, name, text in missing:
        assert f"{module}.{name} needs {blocked[0]}, which is not installed" in text
        extra = "orbax" if "orbax" in blocked else "flax"
        assert text.endswith(f"pip install 'jaxcoll[{extra}]'")
    if "flax" in blocked:
        lacking = {name for module, name, _ in missing if module == "jaxcoll"}
        assert lacking == {*jaxcoll.__all__} - WITHOUT_FLAX - {"__version__"}
        others = {name for module, name, _ in missing if module != "jaxcoll"}
        assert others == {*jaxcoll.models.__all__, *jaxcoll.nnx.__all__}  # optax needs no flax
    if "orbax" in blocked:
        assert [name for _, name, _ in missing] == ["Checkpoints"]
