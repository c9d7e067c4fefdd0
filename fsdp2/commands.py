"""Runs `python -m fsdp2 fixes` and `env`: prints their tables for a terminal."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from .dtensor.fixes import describe_fixes, state_of_fix
from .dtensor.table import FIXES
from .environment import facts
from .tools.columns import aligned, terminal_width, wrapped


def fixes(arguments: Sequence[str]) -> None:
    """Prints one line for each fix for sharded parameters, or all about some of them.

    Raises:
        SystemExit: 2, for wrong arguments; 0, for --help.
    """
    details = {
        fix.name: {
            "in force": state_of_fix(fix),
            "torch": fix.torch,
            "instead": fix.instead,
            "situations": f"{fix.situations} of the tests' situations go wrong without it",
        }
        for fix in FIXES
    }
    about = (
        "Lists what fsdp2 corrects in torch's operations on sharded parameters. FSDP2_DTENSOR_FIXES=-views,-random "
        "leaves some out, FSDP2_DTENSOR_FIXES=off all."
    )
    _print("fixes", about, details, ("in force", "torch"), describe_fixes(), arguments)


def environment(arguments: Sequence[str], version: str) -> None:
    """Prints what a report of a bug needs to say.

    Args:
        arguments: those behind `env`.
        version: the release of fsdp2.

    Raises:
        SystemExit: 2, for wrong arguments; 0, for --help.
    """
    parser = argparse.ArgumentParser(
        prog="python -m fsdp2 env",
        description="Prints releases, devices, backends, the environment variables that change how ranks start, "
        "communicate and allocate memory, the level of checks, and which fixes are switched: for reports of bugs. It "
        "has the names of your machines if variables have them.",
    )
    parser.parse_args([*arguments])
    for line in aligned(facts(version), width=terminal_width()):
        print(line)


def _print(
    command: str,
    about: str,
    details: Mapping[str, Mapping[str, str]],
    shown: Sequence[str],
    markdown: str,
    arguments: Sequence[str],
) -> None:
    """Prints a table of the `shown` details, or Markdown, or all details of the named rows."""
    parser = argparse.ArgumentParser(prog=f"python -m fsdp2 {command}", description=about)
    parser.add_argument("names", nargs="*", metavar="NAME", help="print all about these")
    parser.add_argument("--markdown", action="store_true", help="print the whole table as Markdown")
    given = parser.parse_args([*arguments])
    unknown = [name for name in given.names if name not in details]
    if unknown:
        parser.error(f"expected names among {', '.join(details)}; got {', '.join(unknown)}")
    width = terminal_width()
    if given.markdown:
        print(markdown)
    elif given.names:
        for name in given.names:
            print(name)
            for line in aligned([("", head, text) for head, text in details[name].items()], width=width):
                print(line)
    else:
        rows = [("name", *shown), *((name, *map(of.__getitem__, shown)) for name, of in details.items())]
        for line in aligned(rows, width=width):
            print(line)
        last = f"{about} `python -m fsdp2 {command} NAME` prints all about one."
        print("", *(wrapped(last, width) if width else [last]), sep="\n")
