"""Runs `python -m fsdp2 checks` and `env`: prints their tables for a terminal."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from .checks.levels import level_of
from .checks.table import TABLE, describe_checks
from .environment import facts
from .tools.columns import aligned, terminal_width, wrapped


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
        "communicate and allocate memory, and which checks and fixes are switched: for reports of bugs. It has "
        "the names of your machines if variables have them.",
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
