"""The list of what the seed documents show: signatures are ours, and every row has its tests."""

import ast
import inspect
import pathlib
import re
from typing import Any

import pytest
from pages import named_tests

import jaxcoll
import jaxcoll.models

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "seeds.md"
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.read_text().splitlines()
    if line.startswith("| ") and not line.startswith(("| documented", "| there"))
]
CALL = re.compile(r"`([A-Z]?[\w.]+)\((.*)\)`")
CALLS = [match for row in ROWS if (match := CALL.fullmatch(row[0]))]
# Every public name of the documents: classes with their methods and properties, and functions.
DOCUMENTED = {
    "DeviceMeshManager": """create_device_mesh create_data_parallel_mesh create_model_parallel_mesh
        create_hybrid_mesh get_mesh_info num_devices devices""",
    "DataParallel": """create_data_parallel_sharding shard_batch shard_model_state
        all_reduce_gradients replicate_params create_data_parallel_sharding_static
        shard_batch_static all_reduce_gradients_static""",
    "DevicePlacement": """place_on_device distribute_batch replicate_across_devices shard_batch_dim
        prefetch_to_device get_device_info""",
    "DistributedMetrics": """all_gather reduce_mean reduce_sum reduce_max reduce_min reduce_custom
        collect_from_devices""",
    "": """ShardedLinear shard_params gather_array_with_mean_grads gather_params
        shard_module_params sync_gradients data_parallel_train_step SimpleClassifier TPDense
        TPAsyncDense TPClassifier pipeline_parallel_train_step PPClassifier""",
}
# What else they show, by the page's heading: the first words of each row.
SHOWN = {
    "Artifex: device meshes": """ValueError of `create_device_mesh`|example: basic usage
        |example: data parallelism|example: model parallelism|example: hybrid parallelism
        |example: dict or list""",
    "Artifex: data parallelism": """ValueError of `all_reduce_gradients`|example: basic data
        |example: sharding model state|example: gradient aggregation|example: using static methods
        |example: complete training""",
    "Artifex: model parallelism": """planned: FSDP-style parameter sharding|planned: gradient-only
        |planned: automatic resharding|planned: memory-efficient training|example: JAX's own""",
    "xlstm-jax: fully sharded data parallelism": """`min_weight_size`
        |`gather_dtype`, `grad_scatter_dtype`|all five together""",
    "DistJax": """example: device mesh|example: sharding|example: data parallelism
        |example: tensor parallelism|example: pipeline parallelism""",
    "What was not inherited": """shards of a parameter averaged|a result called replicated
        |gradients too large|a row-parallel bias|parameters of exactly|scalars and indivisible
        |layers lost""",
}


def lookup(name: str) -> Any:
    """Returns a public object of ours by the name it has in the list."""
    first, *rest = name.split(".")
    found = getattr(jaxcoll if first in jaxcoll.__all__ else jaxcoll.models, first)
    for part in rest:
        found = inspect.getattr_static(found, part)
        found = found.__func__ if isinstance(found, staticmethod) else found
    return found


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].replace("`", ""))
def test_each_row_has_its_tests(row: list[str]):
    documented, _, proof = row
    assert documented
    assert named_tests(proof), proof


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call[1])
def test_arguments_and_defaults(call: re.Match[str]):
    """What is documented can be called so; ours may take more, by keyword."""
    name, arguments = call.groups()
    node = ast.parse(f"def f({arguments}): ...").body[0]
    assert isinstance(node, ast.FunctionDef)
    positional, keywords = node.args.args, node.args.kwonlyargs
    values = [ast.unparse(value) for value in node.args.defaults]
    defaults = dict(
        zip([a.arg for a in positional[len(positional) - len(values) :]], values, strict=True)
    )
    target = lookup(name)
    target = target.__init__ if inspect.isclass(target) else target
    found = inspect.signature(target).parameters
    ours = {n: p for n, p in found.items() if n != "self"}
    if not inspect.isclass(lookup(name)):
        assert list(ours)[: len(positional)] == [a.arg for a in positional]
    for argument in [*positional, *keywords]:
        parameter = ours[argument.arg]
        if argument.arg in defaults:
            assert parameter.default == eval(defaults[argument.arg])
    asked = {a.arg for a in [*positional, *keywords]}
    for n, p in ours.items():
        if n not in asked and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL):
            assert p.default is not p.empty, f"{n} would have to be given"


@pytest.mark.parametrize("heading", SHOWN)
def test_no_example_error_or_plan_is_left_out(heading: str):
    section = PAGE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    for words in map(str.strip, SHOWN[heading].split("|")):
        assert f"\n| {words}" in section, words


@pytest.mark.parametrize("owner", DOCUMENTED, ids=lambda owner: owner or "functions")
def test_nothing_is_left_out(owner: str):
    listed = " ".join(row[0] for row in ROWS)
    for name in DOCUMENTED[owner].split():
        assert re.search(rf"\b{re.escape(f'{owner}.{name}' if owner else name)}\b", listed), name
