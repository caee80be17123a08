"""`jaxcoll.info()` and the command of that name."""

import subprocess
import sys

import jax
import pytest
from checks import native_missing

import jaxcoll
from jaxcoll.cli import main


def test_it_says_what_is_here():
    info = jaxcoll.info()
    assert info.versions["jax"] == jax.__version__
    assert info.settings["backend"] == jaxcoll.config.backend
    assert ("native path" in info.off) == (native_missing() is not None)
    assert bool(info.transports) == (native_missing() is None)
    if native_missing() is None:
        assert info.instruction_sets[0] == "baseline"


def test_it_prints_every_field():
    text = str(jaxcoll.info())
    assert f"jax {jax.__version__}" in text
    for title in ("machine", "instruction sets", "transports", "settings", "off: GPU"):
        assert f"\n{title} " in text


def test_the_command(capsys: pytest.CaptureFixture[str]):
    assert main(["info"]) == 0
    assert capsys.readouterr().out == f"{jaxcoll.info()}\n"


def test_it_leaves_jax_alone():
    """Whoever prints it first can still simulate devices, and run natively."""
    script = """
import jaxcoll
print(jaxcoll.info())
jaxcoll.simulate_cpu_devices(2)
import jax
assert len(jax.devices()) == 2
f = jax.pmap(lambda x: jaxcoll.all_reduce(x, "i"), axis_name="i")
assert f(jax.numpy.ones((2, 3))).sum() == 12
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_an_unknown_command(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="2"):
        main(["inform"])
    assert "invalid choice: 'inform'" in capsys.readouterr().err
