"""The pages that list things list all of them."""

import pathlib
import re

import pytest
from pages import DOCS, TESTS, named_tests, pitfalls

import jaxcoll

ROOT = pathlib.Path(__file__).parents[2]


def test_the_reference_has_every_public_name():
    listed = re.findall(r"^\.\. auto\w+:: (\w+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    assert sorted([*listed, "__version__", "models", "nnx", "optax"]) == sorted(jaxcoll.__all__)


def test_the_settings_have_every_environment_variable():
    sources = [*(ROOT / "jaxcoll").rglob("*.py"), ROOT / "pyproject.toml"]
    text = "".join(path.read_text() for path in sources)
    used = set(re.findall(r"\bJAXCOLL_[A-Z_]+\b", text))
    listed = re.findall(r"^\| `(JAXCOLL_\w+)`", (DOCS / "settings.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(used)


def test_the_errors_have_every_exception():
    text = "".join(path.read_text() for path in (ROOT / "jaxcoll").rglob("*.py"))
    raised = set(re.findall(r"\braise (\w+(?:Error|Exit))\(", text))
    errors = (DOCS / "settings.md").read_text().partition("## Errors")[2]
    listed = set(re.findall(r"^\| `(?:jaxcoll\.)?(\w+)`", errors, re.MULTILINE))
    # What Python itself does for a name that a module lacks.
    assert raised - {"AttributeError"} <= listed


@pytest.mark.parametrize("row", pitfalls(), ids=lambda row: row[0])
def test_each_pitfall_has_a_test(row: tuple[str, str]):
    _, proof = row
    assert named_tests(proof)


def test_what_proves_is_there():
    """Files and tests that the page names anywhere; each refusal has a test."""
    text = (DOCS / "proof.md").read_text()
    names = re.findall(r"`((?:\w+/)*test_\w+\.py(?:::\w+)?)`", text)
    assert named_tests(", ".join(f"`{name}`" for name in names if "::" in name))
    assert all((TESTS / name).is_file() for name in names if "::" not in name)
    section = text.partition("\n## Refusals\n")[2].partition("\n## ")[0]
    proofs = re.findall(r"^\| .+ \| (.+) \|$", section, re.MULTILINE)[1:]
    assert proofs
    assert all(map(named_tests, proofs))


def test_every_page_can_be_reached():
    contents = (DOCS / "index.md").read_text()
    for page in DOCS.rglob("*.md"):
        name = str(page.relative_to(DOCS).with_suffix(""))
        assert name == "index" or f"\n{name}\n" in contents, name
