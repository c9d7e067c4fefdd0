"""Defines the settings that a plan compares, and reads sizes and speeds that are written as text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import Any

from ..engine.policy import check_bool

_UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4, "P": 1000**5}
_STATES = {None: 0.0, "none": 0.0, "sgd": 0.0, "momentum": 1.0, "muon": 1.0, "lion": 1.0, "adam": 2.0, "adamw": 2.0}


@dataclass(frozen=True)
class Setting:
    """What one row of a plan's table chooses.

    Args:
        ranks: how many ranks train.
        reshard_after_forward: as for `fully_shard`.
        replicas: how many times the parameters exist (HSDP): each copy is sharded among ranks / replicas ranks.
        checkpointing: the forward of each wrapped module that has submodules runs again in backward.
        offload: shards, gradients and optimizer states are on the CPU (`CPUOffloadPolicy`).
    """

    ranks: int
    reshard_after_forward: bool | int | None = None
    replicas: int = 1
    checkpointing: bool = False
    offload: bool = False

    def __post_init__(self) -> None:
        for name in ("ranks", "replicas"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}: expected an int, got {value!r}")
            if value < 1:
                raise ValueError(f"{name}: expected 1 or more, got {value}")
        if self.ranks % self.replicas:
            raise ValueError(f"replicas: expected a divisor of {self.ranks} ranks, got {self.replicas}")
        for name in ("checkpointing", "offload"):
            check_bool(name, getattr(self, name))
        kept = self.reshard_after_forward
        if kept is not None and not isinstance(kept, bool | int):
            raise TypeError(f"reshard_after_forward: expected a bool, an int or None, got {kept!r}")
        if isinstance(kept, int) and not isinstance(kept, bool) and (kept < 1 or self.num_shards % kept):
            raise ValueError(
                f"reshard_after_forward: expected a divisor of the {self.num_shards} ranks that shard, got {kept}"
            )

    @property
    def num_shards(self) -> int:
        """How many ranks share one copy of the parameters."""
        return self.ranks // self.replicas


def candidates(worlds: Sequence[int], offloads: bool, ranks_per_machine: int) -> list[Setting]:
    """Returns the settings that a plan compares if the user names none. `offloads`: also with CPU offload."""
    found = []
    for world in worlds:
        machines = world // ranks_per_machine if world % ranks_per_machine == 0 else 1
        meshes: list[tuple[int, bool | int | None]] = [(1, None), (1, False)]
        if machines > 1:
            meshes += [(machines, None), (1, ranks_per_machine)]
        choices = (False, True) if offloads else (False,)
        for (replicas, kept), again, offload in product(meshes, (False, True), choices):
            found.append(Setting(world, kept, replicas, again, offload))
    return found


def read_settings(settings: Any, worlds: Sequence[Any]) -> list[Setting]:
    """Returns the settings that a user has named.

    Raises:
        TypeError, ValueError: these are no settings.
    """
    if not isinstance(settings, Iterable) or isinstance(settings, str | Mapping):
        raise TypeError(f"settings: expected a list of dicts, got {settings!r}")
    found, names = [], {each.name for each in fields(Setting)}
    for each in settings:
        if isinstance(each, Setting):
            found.append(each)
        elif isinstance(each, Mapping):
            if unknown := {*each} - names:
                raise ValueError(f"settings: expected {', '.join(sorted(names))}, got {', '.join(sorted(unknown))}")
            found += [Setting(**{"ranks": world, **each}) for world in worlds]
        else:
            raise TypeError(f"settings: expected dicts, got {type(each).__name__}")
    if not found:
        raise ValueError("settings: expected one or more, got none")
    return found


def read_ranks(ranks: Any) -> list[Any]:
    """Returns numbers of ranks, of one or of several."""
    found = [ranks] if isinstance(ranks, int) else [*ranks] if isinstance(ranks, list | tuple | range) else None
    if found is None:
        raise TypeError(f"ranks: expected an int, or a list of them, got {ranks!r}")
    if not found:
        raise ValueError("ranks: expected one number or more, got none")
    for world in found:
        Setting(world)  # which checks it
    return found


def read_bytes(name: str, value: Any) -> float | None:
    """Returns bytes, or bytes per second, of a number or of a text such as "24GB" (10**9), "24GiB" (2**30), "50GB/s".

    Raises:
        TypeError, ValueError: it is neither.
    """
    if value is None:
        return None
    if isinstance(value, str):
        found = re.fullmatch(r"\s*([\d.]+(?:e[+-]?\d+)?)\s*([KMGTP]?)(i?)B?(?:/s)?\s*", value, re.IGNORECASE)
        if found is None:
            raise ValueError(f'{name}: expected a number of bytes or a text like "24GB" or "50GB/s", got {value!r}')
        unit = _UNITS[found[2].upper()]
        value = float(found[1]) * (1024 ** [*_UNITS.values()].index(unit) if found[3] else unit)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f'{name}: expected a number or a text like "24GB", got {type(value).__name__}')
    if not value > 0:
        raise ValueError(f"{name}: expected more than 0, got {value}")
    return float(value)


def read_optimizer(value: Any, itemsize: int) -> float:
    """Returns the bytes of optimizer state for each parameter element that is stored in `itemsize` bytes.

    torch's optimizers keep their moments in the dtype of the parameter: Adam and AdamW two of them, SGD with momentum,
    Lion and Muon one. Their step counters are not counted.

    Raises:
        TypeError, ValueError: the name is unknown, or it is no number.
    """
    if value is None or isinstance(value, str):
        key = value if value is None else value.lower()
        if key not in _STATES:
            known = ", ".join(repr(name) for name in _STATES)
            raise ValueError(f"optimizer: expected one of {known}, or bytes for each element, got {value!r}")
        return _STATES[key] * itemsize
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"optimizer: expected a name or a number of bytes, got {type(value).__name__}")
    if value < 0:
        raise ValueError(f"optimizer: expected 0 bytes for each element or more, got {value}")
    return float(value)
