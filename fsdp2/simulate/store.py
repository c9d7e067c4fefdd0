"""Provides the store of simulated ranks, in place of TCPStore."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from .turns import Wait, this_rank


class LocalStore(dist.Store):
    """A store in the memory of the process. A rank that waits for a key lets others run."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        self._values[key] = _encoded(value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def compare_set(self, key: str, expected: bytes | str, value: bytes | str) -> bytes:
        if self._values.get(key, b"") == _encoded(expected):
            self.set(key, value)
        return self._values.get(key, _encoded(expected))

    def add(self, key: str, amount: int) -> int:
        total = int(self._values.get(key, b"0")) + amount
        self.set(key, str(total))
        return total

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        this_rank("a store").wait(_Keys(self, keys))

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self._values)

    def set_timeout(self, timeout: timedelta) -> None:
        """Does nothing: no rank waits in vain."""


class _Keys(Wait):
    """Keys of a store that a rank waits for."""

    def __init__(self, store: LocalStore, keys: Sequence[str]) -> None:
        super().__init__(f"waits for {', '.join(keys)} in a store")
        self._store, self._keys = store, keys

    def can_go_on(self) -> bool:
        return self.error is not None or self._store.check(self._keys)


def _encoded(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
