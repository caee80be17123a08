"""The way to a user: the wheel is portable; the source tree installs, also without a compiler.

Each test installs into an environment that holds jax and numpy and nothing else, and runs
tools/smoke.py from an empty directory, so that no source tree can stand in for the package.
Environment variable JAXCOLL_WHEEL: test this wheel instead of building one.
"""

import importlib.metadata
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.release, pytest.mark.timeout(900)]

ROOT = pathlib.Path(__file__).parents[2]
# What jax and numpy bring along; "setuptools" is what Python 3.11's venv puts there.
BARE = {"jax", "jaxlib", "numpy", "scipy", "ml_dtypes", "opt_einsum", "pip", "setuptools"}


def run(*command: object, **kwargs) -> str:
    """Runs a command, shows what it said if it failed, returns its standard output."""
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, **kwargs)
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def installed(python: pathlib.Path) -> set[str]:
    """The names of what an environment holds."""
    listed = json.loads(run(python, "-m", "pip", "list", "--format=json"))
    return {package["name"].replace("-", "_") for package in listed}


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The Python of an environment with jax and numpy. A test that installs jaxcoll removes it."""
    venv = tmp_path_factory.mktemp("bare")
    run(sys.executable, "-m", "venv", venv)
    python = venv / "bin" / "python"
    pip = [python, "-m", "pip"]
    run(*pip, "install", "--quiet", "--upgrade", "pip")
    run(*pip, "install", "--quiet", f"jax=={importlib.metadata.version('jax')}", "numpy")
    assert installed(python) <= BARE
    return python


def check(
    python: pathlib.Path,
    directory: pathlib.Path,
    *install: object,
    path: str = "native",
    **variables: str,
) -> str:
    """Installs jaxcoll, checks that it brought nothing and runs on `path`, and removes it again.

    Returns what the installation said.
    """
    before = installed(python)
    installation = subprocess.run(
        [python, "-m", "pip", "install", "--verbose", *map(str, install)],
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    said = installation.stdout
    assert installation.returncode == 0, said
    try:
        assert installed(python) == before | {"jaxcoll"}
        environment = {"PATH": str(python.parent), "HOME": str(directory)}
        assert shutil.which("c++", path=environment["PATH"]) is None  # nor another compiler
        ran = run(python, ROOT / "tools" / "smoke.py", path, cwd=directory, env=environment)
        assert f"run on the {path} path" in ran
        return said
    finally:
        run(python, "-m", "pip", "uninstall", "--yes", "jaxcoll")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    if given := os.environ.get("JAXCOLL_WHEEL"):
        return pathlib.Path(given)
    out = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", out, ROOT)
    return next(out.glob("*.whl"))


def test_wheel_is_portable(wheel: pathlib.Path):
    auditwheel = pathlib.Path(sys.executable).parent / "auditwheel"
    report = " ".join(run(auditwheel, "show", wheel).split())  # it wraps its lines anywhere
    policy = re.search(r'the following platform tag: "(\w+)"', report)
    assert policy, report
    print(f"{wheel.name}: {policy[1]}")
    assert policy[1].startswith("manylinux"), report


def test_wheel_holds_the_package_and_nothing_else(wheel: pathlib.Path):
    names = run(sys.executable, "-m", "zipfile", "-l", wheel)
    tops = {line.split("/")[0] for line in names.splitlines()[1:]}
    assert {re.sub(r"-.*", "", top) for top in tops} == {"jaxcoll"}
    assert "jaxcoll/_core.pyi" in names
    assert "jaxcoll/py.typed" in names
    assert "jaxcoll/libjaxcoll_mpi.so" in names
    assert "jaxcoll/libjaxcoll_cuda.so" in names


def test_wheel_runs_in_an_empty_environment(
    wheel: pathlib.Path, bare: pathlib.Path, tmp_path: pathlib.Path
):
    check(bare, tmp_path, wheel)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A copy of what an installation needs, so that an editable one leaves no trace here."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("csrc", "jaxcoll"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("*.so"))
    return copy


@pytest.mark.long  # CI's wheel is of the same sources
def test_source_tree_installs(source: pathlib.Path, bare: pathlib.Path, tmp_path: pathlib.Path):
    check(bare, tmp_path, source)


@pytest.mark.long  # CI's other steps install so
def test_source_tree_installs_editable(
    source: pathlib.Path, bare: pathlib.Path, tmp_path: pathlib.Path
):
    check(bare, tmp_path, "--editable", source)


@pytest.mark.parametrize(
    "variables",
    [{"JAXCOLL_NATIVE": "OFF"}, {"CXX": "/bin/false", "CC": "/bin/false"}],
    ids=["as asked for", "without a compiler"],
)
def test_source_tree_installs_without_the_extension(
    variables: dict[str, str], source: pathlib.Path, bare: pathlib.Path, tmp_path: pathlib.Path
):
    said = check(bare, tmp_path, source, path="lax", **variables)
    assert "jaxcoll-0.1.0-py3-none-any.whl" in said
    words = " ".join(said.split())  # lines are broken anywhere
    assert words.count("jaxcoll was installed without its native extension") == 1
