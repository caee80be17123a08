"""Code blocks of Markdown pages, and whether an output is what a page shows."""

import pathlib
import re
import shlex

TESTS = pathlib.Path(__file__).parent
DOCS = TESTS.parent / "docs"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def python_blocks(page: pathlib.Path) -> list[tuple[str, str]]:
    """Returns (code, output shown right below it or "") of a page's Python blocks, in order."""
    found: list[tuple[str, str]] = []
    text = page.read_text()
    end = None
    for match in BLOCK.finditer(text):
        kind, body = match.groups()
        if kind == "python":
            found.append((body, ""))
        elif kind == "text" and found and end is not None and not text[end : match.start()].strip():
            found[-1] = (found[-1][0], body)
        end = match.end()
    return found


def commands(page: pathlib.Path) -> list[list[str]]:
    """Returns the arguments of each `jaxcoll ...` in a page's shell blocks."""
    bodies = [body for kind, body in BLOCK.findall(page.read_text()) if kind == "sh"]
    lines = [line for body in bodies for line in body.splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith("jaxcoll ")]


def named_tests(text: str) -> list[tuple[str, str]]:
    """Returns (file, test) of everything in backticks; the file is a path below `tests/`.

    Raises:
        ValueError: something in backticks is no test.
    """
    found = []
    for name in re.findall(r"`([^`]*)`", text):
        match = re.fullmatch(r"([\w/]+\.py)::(\w+)", name)
        path = TESTS / match[1] if match else TESTS
        if not match or not re.search(rf"^def {match[2]}\(", path.read_text(), re.MULTILINE):
            raise ValueError(f"there is no test {name}")
        found.append((match[1], match[2]))
    return found


def pitfalls() -> list[tuple[str, str]]:
    """Returns what goes wrong, and its tests, of each row of the table in docs/proof.md."""
    table = (DOCS / "proof.md").read_text().partition("\n## Pitfalls")[2]
    # The line of headings is none, and that below has no spaces.
    return re.findall(r"^\|.* \| (.+) \| (.+) \|$", table, re.MULTILINE)[1:]


def is_as_shown(output: str, shown: str) -> bool:
    """Compares but for white space; `...` in what the page shows stands for anything."""
    parts = [r"\s+".join(map(re.escape, part.split())) for part in shown.split("...")]
    pattern = r"\s*" + r".*".join(rf"\s*{part}\s*" for part in parts) + r"\s*"
    return re.fullmatch(pattern, output, re.DOTALL) is not None
