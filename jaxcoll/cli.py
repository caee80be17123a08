"""The command `jaxcoll`."""

import argparse
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    parser = argparse.ArgumentParser(prog="jaxcoll", description="Collectives for JAX.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    info = commands.add_parser("info", help="what this installation has, and what is off and why")
    info.set_defaults(run=_info)
    chosen = parser.parse_args(arguments)
    return chosen.run(chosen)


def _info(_: argparse.Namespace) -> int:
    from jaxcoll._info import info

    print(info())
    return 0
