"""Runs `python -m fsdp2 fixes` and `python -m fsdp2 checks`: prints their tables for a terminal."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Mapping, Sequence

from .checks.levels import level_of
from .checks.table import TABLE, describe_checks
from .dtensor.fixes import describe_fixes, state_of_fix
from .dtensor.table import FIXES
from .tools.describe import aligned

# Where the output is no terminal, whose width says how long a line may be.
_WIDTH = 120


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


def checks(arguments: Sequence[str]) -> None:
    """Prints one line for each check, or all about some of them.

    Raises:
        SystemExit: 2, for wrong arguments; 0, for --help.
    """
    details = {
        row.name: {
            "level": level_of(row.name),
            "catches": row.catches,
            "communicates": row.communicates,
            "costs": row.costs,
        }
        for row in TABLE
    }
    about = (
        "Lists what fsdp2 checks during training. FSDP2_CHECKS='entry points=off, unseen writes=debug' changes the "
        "level of some (off, default or debug), FSDP2_CHECKS=off that of all."
    )
    _print("checks", about, details, ("level", "catches"), describe_checks(), arguments)


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
    if given.markdown:
        print(markdown)
    elif given.names:
        for name in given.names:
            print(name)
            print("\n".join(f"  {line}" for line in aligned([*details[name].items()], ())))
    else:
        width = shutil.get_terminal_size((_WIDTH, 24)).columns
        rows = [("name", *shown), *((name, *map(of.__getitem__, shown)) for name, of in details.items())]
        for line in aligned(rows, ()):
            print(line if len(line) <= width else line[: max(width - 3, 0)] + "...")
        print(f"\n{about} `python -m fsdp2 {command} NAME` prints all about one.")
