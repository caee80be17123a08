"""`jaxcoll.config` and the environment behind it."""

import os
import subprocess
import sys
from typing import Any

import pytest
from checks import native_missing

import jaxcoll
from jaxcoll._config import Config


def test_the_native_path_is_there():
    """Fails where all other tests would quietly run on lax."""
    if jaxcoll.config.backend == "lax":
        pytest.skip("JAXCOLL_BACKEND=lax")
    if os.environ.get("JAXCOLL_TESTS_WITHOUT_NATIVE"):  # make test-fallback
        assert "installed without its native extension" in str(native_missing())
        return
    assert native_missing() is None


def test_defaults():
    config = Config({})
    assert (config.timeout_s, config.strict) == (300.0, False)
    assert repr(config).startswith("jaxcoll.config(backend=")


@pytest.mark.parametrize("backend", ["auto", "native", "lax", " lax "])
def test_the_environment_sets_the_backend(backend: str):
    command = [sys.executable, "-c", "import jaxcoll; print(jaxcoll.config.backend)"]
    environment = os.environ | {"JAXCOLL_BACKEND": backend}
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.strip() == backend.strip()


def test_config_goes_before_the_environment():
    script = "import jaxcoll; jaxcoll.config.backend = 'auto'; print(jaxcoll.config.backend)"
    result = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"JAXCOLL_BACKEND": "lax"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert result.stdout.strip() == "auto"


def test_a_misspelt_environment_is_an_error_at_import():
    result = subprocess.run(
        [sys.executable, "-c", "import jaxcoll"],
        env=os.environ | {"JAXCOLL_BACKEND": "naitve"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert result.returncode == 1
    assert result.stderr.strip().endswith(
        'ValueError: environment: JAXCOLL_BACKEND: expected one of "auto", "native", "lax", got '
        "'naitve'. Did you mean \"native\"?"
    )


@pytest.mark.parametrize(
    ("text", "seconds"), [("", 300.0), ("12.5", 12.5), ("None", None), ("none", None), ("1e3", 1e3)]
)
def test_the_environment_sets_the_timeout(text: str, seconds: float | None):
    assert Config({"JAXCOLL_TIMEOUT_S": text}).timeout_s == seconds


@pytest.mark.parametrize("text", ["soon", "-1", "0", "nan", "inf", "2e9"])
def test_a_wrong_timeout_in_the_environment(text: str):
    with pytest.raises(
        ValueError,
        match=rf"environment: JAXCOLL_TIMEOUT_S: expected a positive number .* got '{text}'\.",
    ):
        Config({"JAXCOLL_TIMEOUT_S": text})


@pytest.mark.parametrize("value", ["5", -1, 0, True, float("nan"), float("inf"), [1]], ids=str)
def test_a_wrong_timeout(value: Any):
    config = Config({})
    with pytest.raises(ValueError, match=r"jaxcoll.config: timeout_s: expected a positive number"):
        config.timeout_s = value
    assert config.timeout_s == 300.0


@pytest.mark.parametrize("value", ["yes", 1, None], ids=str)
def test_a_wrong_strict(value: Any):
    with pytest.raises(TypeError, match=rf"jaxcoll.config: strict: expected a bool, got {value!r}"):
        Config({}).strict = value


def test_a_misspelt_setting_is_an_error():
    with pytest.raises(AttributeError, match="timeout"):
        jaxcoll.config.timeout = 5


def test_the_reduction_order_has_two_names():
    assert jaxcoll.config.reduction_order == "layout"
    jaxcoll.config.reduction_order = "rank"
    jaxcoll.config.reduction_order = "layout"
    with pytest.raises(ValueError, match='expected one of "layout", "rank", got \'ring\''):
        jaxcoll.config.reduction_order = "ring"
