"""Command-line options from frozen dataclasses: the default, the type and the help stand once."""

import argparse
import dataclasses
from typing import Any


def option(default: Any, help_text: str) -> Any:
    """Declare a dataclass field that is also a command-line option of the same name."""
    return dataclasses.field(default=default, metadata={"help": help_text})


def parse(description: str, *classes: type, argv: list[str] | None = None) -> list[Any]:
    """Read one instance of each dataclass from the command line.

    Args:
        description: Shown by `--help`.
        *classes: Frozen dataclasses made of `option` fields; a title each in `--help`.
        argv: Arguments; those of the process if None.

    Returns:
        One instance per class.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    for cls in classes:
        group = parser.add_argument_group((cls.__doc__ or cls.__name__).splitlines()[0].rstrip("."))
        for field in dataclasses.fields(cls):
            flag = "--" + field.name.replace("_", "-")
            if isinstance(field.default, bool):
                kind: dict[str, Any] = {"action": "store_true"}
            else:
                kind = {"type": type(field.default), "metavar": type(field.default).__name__}
            group.add_argument(flag, default=field.default, help=field.metadata["help"], **kind)
    values = vars(parser.parse_args(argv))
    return [cls(**{f.name: values[f.name] for f in dataclasses.fields(cls)}) for cls in classes]
