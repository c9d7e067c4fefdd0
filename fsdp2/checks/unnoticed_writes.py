"""Finds offloaded shards that were written to unnoticed, while they may still have been copied to the device."""

from __future__ import annotations

from typing import Any

from ..engine.events import Observer
from ..engine.root import Root
from ..engine.write_notices import notices


class UnnoticedWrites(Observer):
    """Compares the versions of offloaded shards behind a forward with those before the next pass."""

    def __init__(self) -> None:
        # Groups whose shards may still be copied to the device, and the shards' versions.
        self._unsettled: list[tuple[Any, tuple[int, ...]]] = []

    def pass_ended(self, root: Root) -> None:
        self._unsettled = [(group, group.shard_versions()) for group in root.groups if group.transfers is not None]
        notices.before_next_write(self._compare)

    def pass_began(self, root: Root) -> None:
        self._compare()

    def backward_began(self, root: Root) -> None:
        self._compare()

    def pass_failed(self, root: Root, in_backward: bool) -> None:
        self._unsettled = []  # the other error comes first

    def _compare(self) -> None:
        unsettled, self._unsettled = self._unsettled, []
        written = [group for group, versions in unsettled if group.registration.versions() != versions]
        if written:
            raise RuntimeError(
                f"{', '.join(map(str, written))}: a shard was written to by its private local tensor, behind a "
                "forward, perhaps while it was still copied to the device. Write to the sharded parameter, or to what "
                "its to_local() returns; and load a checkpoint before you go on."
            )


def make_unnoticed_writes(root: Root) -> UnnoticedWrites | None:
    """Returns an observer for roots whose shards rest on the CPU."""
    return UnnoticedWrites() if any(group.transfers is not None for group in root.groups) else None
