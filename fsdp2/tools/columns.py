"""Lays out rows as text in columns, and wraps cells where a line would be longer than a terminal is wide."""

from __future__ import annotations

import shutil
from collections.abc import Container, Sequence
from itertools import zip_longest
from textwrap import wrap

# Columns are not made narrower than this, which sizes need ("37.6 GiB").
_NARROWEST = 8
_GAP = "  "


def aligned(rows: Sequence[Sequence[str]], right: Container[int] = (), width: int | None = None) -> list[str]:
    """Returns the lines of a table: one for each row, or several if cells are wrapped.

    Args:
        rows: the cells, as many in each row.
        right: the columns that are right-aligned, as numbers are.
        width: how long a line may be. The widest columns are wrapped until lines fit. None: no cell is wrapped.
    """
    return [line for lines in _laid_out(rows, right, width) for line in lines]


def ruled(rows: Sequence[Sequence[str]], right: Container[int] = (), width: int | None = None) -> list[str]:
    """Returns the lines of a table whose first row has the heads, with a rule behind it."""
    heads, *others = _laid_out(rows, right, width)
    lines = [line for lines in others for line in lines]
    return [*heads, "-" * max(map(len, [*heads, *lines])), *lines]


def terminal_width() -> int | None:
    """Returns how many columns the terminal has, or COLUMNS says; None if the output is no terminal."""
    return shutil.get_terminal_size((0, 0)).columns or None


def _laid_out(rows: Sequence[Sequence[str]], right: Container[int], width: int | None) -> list[list[str]]:
    """Returns the lines of each row."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if width is not None:
        _shrink(widths, width)
    signs = [f"{'>' if i in right else '<'}{each}" for i, each in enumerate(widths)]
    found = []
    for row in rows:
        cells = (wrapped(cell, each) for cell, each in zip(row, widths, strict=True))
        found.append([_GAP.join(map(format, line, signs)).rstrip() for line in zip_longest(*cells, fillvalue="")])
    return found


def _shrink(widths: list[int], width: int) -> None:
    """Makes the widest columns narrower, so that lines fit."""
    while sum(widths) + len(_GAP) * (len(widths) - 1) > width:
        widest = max(widths)
        if widest <= _NARROWEST:
            return
        widths[widths.index(widest)] -= 1


def wrapped(text: str, width: int) -> list[str]:
    """Returns the lines of `text`, none of them longer than `width`."""
    return [text] if len(text) <= width else wrap(text, width, break_on_hyphens=False)
