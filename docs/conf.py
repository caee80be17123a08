"""How `make docs` builds the pages, with every warning an error."""

import re
from importlib import metadata
from typing import Any

project = "jaxcoll"
author = "The jaxcoll authors"
release = metadata.version("jaxcoll")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = f"jaxcoll {release}"

# The text of each argument says what it takes.
autodoc_typehints = "none"
autodoc_member_order = "bysource"


def _notes_to_paragraphs(
    _app: Any, _what: str, _name: str, _obj: Any, _opts: Any, lines: list[str]
):
    """Makes a paragraph of each note such as `Cost: ...` with its indented lines."""
    in_note = False
    for i, line in reversed(list(enumerate(lines))):
        if note := re.match(r"(Cost|Differentiable|Deterministic|Source): (.*)", line):
            lines[i : i + 1] = ["", f"**{note[1]}:** {note[2]}"]
    for i, line in enumerate(lines):
        in_note = line.startswith("**") or (in_note and line.startswith(" "))
        if in_note:
            lines[i] = line.strip()


def setup(app: Any) -> None:
    # Before napoleon, which takes them for something else.
    app.connect("autodoc-process-docstring", _notes_to_paragraphs, priority=400)
