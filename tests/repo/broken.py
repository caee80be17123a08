"""Runs a test on the package with one of its rules broken.

    python tests/repo/broken.py MODULE OLD NEW TEST

Nothing is copied, so it does not matter how the package is installed: the module is compiled from
another text when it is imported.
"""

import os
import pathlib
import sys
import types
from importlib.machinery import SourceFileLoader

import pytest

TESTS = pathlib.Path(__file__).parents[1]
_get_code = SourceFileLoader.get_code


def main(module: str, old: str, new: str, test: str) -> int:
    def get_code(self: SourceFileLoader, name: str) -> types.CodeType | None:
        if name != module:
            return _get_code(self, name)
        text = pathlib.Path(self.path).read_text()
        assert text.count(old) == 1, f"{self.path} does not hold this text once: {old!r}"
        return compile(text.replace(old, new), self.path, "exec", dont_inherit=True)

    SourceFileLoader.get_code = get_code
    sys.path.insert(0, str(TESTS))
    from quick import XLA_FLAGS

    # --full, so that every case of a product can be named, but as quickly as without.
    os.environ["XLA_FLAGS"] = XLA_FLAGS
    options = ["--full", "-x", "-q", "--tb=line", "-p", "no:cacheprovider"]
    return pytest.main([str(TESTS / test), f"--rootdir={TESTS.parent}", *options])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
