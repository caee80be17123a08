"""The rules of imports and includes, as a function of a tree: `violations(root)`.

Imports run downwards only, and inside a layer without a cycle. What only one place may touch is
listed with that place. Rules for code that does not exist yet cost nothing, so the tables hold the
whole architecture.
"""

import ast
import graphlib
import pathlib
import re
from collections.abc import Iterator

Edge = tuple[str, str, str]  # file, importing component, imported component

# Lowest first. A component is a module or a package directly under jaxcoll, a folder under csrc.
PYTHON_LAYERS = (
    {
        *("_types", "_errors", "_lazy", "_compat", "_config", "_decisions", "_crossovers"),
        *("_clusters", "_addresses", "_mpi_library", "_compiled", "_blas", "_steps", "_cuda"),
        *("_nccl_types", "_host", "_limits", "_environment", "_coordination", "_cpu"),
    },
    {
        *("_native", "_processes", "_segments", "_board", "_door", "_engine", "_hosts", "_job"),
        *("_clones", "_predicates", "_lowering", "_lax_rules", "mesh", "_sharding", "diagnosis"),
        *("_in_place", "_nccl_calls", "_order"),
    },
    {"collectives", "_accelerate", "_explain", "_info", "_initialize", "_launcher", "_watch"},
    {"_agreement"},
    {"_timing", "_chains", "_bench", "_bench_matmul", "_launched"},
    {"parallel"},
    {"nn", "nnx", "optax"},
    {"models", "cli"},
    {"__init__", "__main__"},  # the face: it may name everything, nobody imports it from inside
)
CXX_LAYERS = ({"core"}, {"kernels"}, {"host"}, {"matmul", "cuda", "mpi"}, {"ffi"}, {"module"})

# Module prefix -> the only files that may import it.
PYTHON_ONLY_IN = {
    "jax._src": {"jaxcoll/_compat.py"},
    "jax.ffi": {"jaxcoll/_native.py"},
    "jaxcoll._core": {"jaxcoll/_native.py"},
}
# Pattern of an include -> the only files, as a pattern of their path, that may have it.
CXX_ONLY_IN = {
    r"xla/": r"csrc/(ffi/.*|module\.cc)",
    r"Python\.h|nanobind/": r"csrc/module\.cc",
    r".*intrin\.h|arm_neon\.h": r"csrc/(kernels/\w+_(avx2|avx512|neon)|core/denormals)\.cc",
}
# parallel's modules do not know each other, but for the data that they share and the composer.
PARALLEL_SHARED = {
    *("after", "batches", "clipping", "elementwise", "first_values", "gathered_scan"),
    *("partitioned", "pieces", "piecewise", "precision", "pure_model", "regions", "reshard"),
    *("shares", "splits"),
    *("stacked", "state", "step", "synchronize", "zero", "compressed_mean", "quantization"),
    *("gated", "schedules", "stages", "tick_table", "pipeline_cut", "pipeline_run", "pipe"),
    *("one_library", "pipelined", "scattered_grads", "averaged", "optimizer_state"),
}
PARALLEL_COMPOSERS = {"plan", "__init__"}


def violations(root: pathlib.Path) -> list[str]:
    """Returns one line for each broken rule in `root`, a repository with jaxcoll/ and csrc/."""
    python, cxx = list(_python_edges(root)), list(_cxx_edges(root))
    return [
        *_upward(python, PYTHON_LAYERS),
        *_upward(cxx, CXX_LAYERS),
        *_cycle(_python_module_graph(root)),
        *_cycle(_cxx_file_graph(root)),
        *_python_restricted(root),
        *_cxx_restricted(root),
        *_parallel_siblings(root),
    ]


def _upward(edges: list[Edge], layers: tuple[set[str], ...]) -> Iterator[str]:
    """Edges that lead upwards, and components that the table does not know."""
    rank = {component: level for level, layer in enumerate(layers) for component in layer}
    unknown = {(file, c) for file, a, b in edges for c in (a, b) if c not in rank}
    for file, component in sorted(unknown):
        yield f"{file}: {component} is in no layer: give it one in tests/repo/layering.py"
    for file, a, b in edges:
        if a in rank and b in rank and rank[a] < rank[b]:
            yield f"{file}: {a} imports {b}, which is above it"


def _cycle(graph: dict[str, set[str]]) -> Iterator[str]:
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        yield "cycle: " + " -> ".join(error.args[1])


# ---- Python --------------------------------------------------------------------------------------


def _python_files(root: pathlib.Path) -> Iterator[tuple[str, ast.Module]]:
    for path in sorted((root / "jaxcoll").rglob("*.py")):
        yield path.relative_to(root).as_posix(), ast.parse(path.read_text())


def _imports(tree: ast.AST) -> Iterator[str]:
    """Dotted names that a module imports or reaches as attributes of an imported name.

    Imports inside functions count too: a cycle that waits for a call is still a cycle. Those under
    `if TYPE_CHECKING:` do not run and do not count.
    """
    for node in _walk_runtime(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            dotted = _dotted(node)
            if dotted.startswith("jax."):
                yield dotted


def _walk_runtime(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        yield node
        yield from _walk_runtime(node)


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def _component(file: str) -> str:
    return file.split("/")[1].removesuffix(".py")


def _python_edges(root: pathlib.Path) -> Iterator[Edge]:
    for file, tree in _python_files(root):
        yield file, _component(file), _component(file)  # so that an unknown file is seen
        for name in _imports(tree):
            parts = name.split(".")
            if parts[0] != "jaxcoll" or parts[:2] == ["jaxcoll", "_core"]:
                continue
            # `from jaxcoll import all_reduce` and `import jaxcoll` go through the face.
            base = root.joinpath(*parts[:2])
            is_component = len(parts) > 1 and (base.is_dir() or base.with_suffix(".py").exists())
            yield file, _component(file), parts[1] if is_component else "__init__"


def _find_module(root: pathlib.Path, parts: list[str]) -> str | None:
    """The file of the longest prefix of a dotted name that is a module below jaxcoll, if any."""
    for length in range(len(parts), 1, -1):
        base = "/".join(parts[:length])
        for file in (f"{base}.py", f"{base}/__init__.py"):
            if (root / file).exists():
                return file
    return None


def _python_module_graph(root: pathlib.Path) -> dict[str, set[str]]:
    """File -> files it imports, without the lazy face, which may name everything."""
    graph: dict[str, set[str]] = {}
    for file, tree in _python_files(root):
        if file == "jaxcoll/__init__.py":
            continue
        names = (name.split(".") for name in _imports(tree))
        targets = {_find_module(root, name) for name in names if name[0] == "jaxcoll"}
        graph[file] = {target for target in targets if target and target != file}
    return graph


def _python_restricted(root: pathlib.Path) -> Iterator[str]:
    for file, tree in _python_files(root):
        for name in sorted(set(_imports(tree))):
            for prefix, allowed in PYTHON_ONLY_IN.items():
                if f"{name}.".startswith(f"{prefix}.") and file not in allowed:
                    yield f"{file}: {name} only in {', '.join(allowed)}"


def _parallel_siblings(root: pathlib.Path) -> Iterator[str]:
    for file, tree in _python_files(root):
        stem = pathlib.PurePath(file).stem
        if not file.startswith("jaxcoll/parallel/") or stem in PARALLEL_COMPOSERS:
            continue
        for name in _imports(tree):
            parts = name.split(".")
            if parts[:2] == ["jaxcoll", "parallel"] and parts[2] not in PARALLEL_SHARED | {stem}:
                yield f"{file}: {name}: parallel modules do not import each other"


# ---- C++ -----------------------------------------------------------------------------------------


def _cxx_includes(root: pathlib.Path) -> Iterator[tuple[str, str]]:
    for path in sorted((root / "csrc").rglob("*")):
        if path.suffix in {".h", ".cc", ".cu"}:
            for include in re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)', path.read_text(), re.M):
                yield path.relative_to(root).as_posix(), include


def _cxx_edges(root: pathlib.Path) -> Iterator[Edge]:
    for file, include in _cxx_includes(root):
        if (root / "csrc" / include).exists():
            folder = file.split("/")[1] if file.count("/") > 1 else pathlib.PurePath(file).stem
            yield file, folder, include.split("/")[0]


def _cxx_file_graph(root: pathlib.Path) -> dict[str, set[str]]:
    graph: dict[str, set[str]] = {}
    for file, include in _cxx_includes(root):
        if (root / "csrc" / include).exists():
            graph.setdefault(file, set()).add(f"csrc/{include}")
    return graph


def _cxx_restricted(root: pathlib.Path) -> Iterator[str]:
    for file, include in _cxx_includes(root):
        for pattern, allowed in CXX_ONLY_IN.items():
            if re.match(pattern, include) and not re.fullmatch(allowed, file):
                yield f"{file}: <{include}> only in {allowed}"
