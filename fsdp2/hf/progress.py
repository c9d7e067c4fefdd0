"""Shows how much was loaded or saved, by tqdm."""

from __future__ import annotations

import contextlib
from typing import Any

# From how many bytes on a bar is shown unasked.
LONG_NBYTES = 4 * 1024**3


class Progress:
    """Context: shows a bar on the first rank if `wanted` is True; if it is None, for many bytes and where tqdm is
    installed.

    Raises:
        TypeError: `wanted` is neither a bool nor None.
        ImportError: it is wanted, and tqdm is not there.
    """

    def __init__(self, what: str, wanted: bool | None, is_first: bool) -> None:
        if wanted is not None and not isinstance(wanted, bool):
            raise TypeError(f"progress: expected a bool or None, got {wanted!r}")
        self._what, self._wanted, self._is_first = what, wanted, is_first
        self._bar: Any = None
        if wanted:
            import tqdm  # noqa: F401  on all ranks, which all raise then

    def begin(self, nbytes: int) -> Progress:
        """Shows the bar, for so many bytes."""
        if self._is_first and (self._wanted or (self._wanted is None and nbytes >= LONG_NBYTES)):
            with contextlib.suppress(ImportError):
                from tqdm import tqdm

                self._bar = tqdm(desc=self._what, total=nbytes, unit="B", unit_scale=True, unit_divisor=1024)
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def add(self, nbytes: int) -> None:
        """Notes that so many bytes more are done."""
        if self._bar is not None:
            self._bar.update(nbytes)
