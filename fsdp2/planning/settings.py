"""Defines the settings that a plan compares, and reads sizes, speeds and times that are written as text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, cast

import torch

from ..engine.codec import Compression
from ..engine.policy import MixedPrecisionPolicy, check_bool
from .network import Latency

_UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4, "P": 1000**5}
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_STATES = {None: 0.0, "none": 0.0, "sgd": 0.0, "momentum": 1.0, "muon": 1.0, "lion": 1.0, "adam": 2.0, "adamw": 2.0}


@dataclass(frozen=True)
class Setting:
    """Holds what one row of a plan's table chooses.

    Args:
        ranks: how many ranks train.
        reshard_after_forward: as for `fully_shard`.
        replicas: how many times the parameters exist (HSDP): each copy is sharded among ranks / replicas ranks.
        checkpointing: the forward of each wrapped module runs again in backward.
        offload: shards, gradients and optimizer states rest on the CPU.
        wire_dtype: the dtype in which gradients travel, as `reduce_scatter` of `fsdp2.codecs.Compression`.
        policy: the name of the wrap policy, if there are several.
        blocks_per_call: up to so many neighbouring blocks are in one `fully_shard` call, and gathered and reduced
            together; the first ones are fewer.
        offload_budget: with `offload`, so many bytes of a rank's shards stay on the device (`OffloadBudget`).
        shard_at_rest: replicas share what rests: all ranks hold a part of shards, gradients and optimizer states.
        by_rows: FQNs of embeddings whose rows are looked up at the ranks that own them (`embed_by_rows`).
        offload_states: optimizer states rest on the CPU (`flatten_optimizer(offload_states=True)`).
        beside_forward: the optimizer steps beside the next forward (`flatten_optimizer(beside_forward=True)`).
        cheapest_dims: each parameter is sharded along the dim that is cheapest to gather (`cheapest_placement`), not
            along dim 0.
    """

    ranks: int
    reshard_after_forward: bool | int | None = None
    replicas: int = 1
    checkpointing: bool = False
    offload: bool = False
    wire_dtype: torch.dtype | None = None
    policy: str = ""
    blocks_per_call: int = 1
    offload_budget: int | None = None
    shard_at_rest: bool = False
    by_rows: tuple[str, ...] = ()
    offload_states: bool = False
    beside_forward: bool = False
    cheapest_dims: bool = False

    def __post_init__(self) -> None:
        for name in ("ranks", "replicas", "blocks_per_call"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}: expected an int, got {value!r}")
            if value < 1:
                raise ValueError(f"{name}: expected 1 or more, got {value}")
        if self.ranks % self.replicas:
            raise ValueError(f"replicas: expected a divisor of {self.ranks} ranks, got {self.replicas}")
        for name in ("checkpointing", "offload", "shard_at_rest", "offload_states", "beside_forward", "cheapest_dims"):
            check_bool(name, getattr(self, name))
        if self.wire_dtype is not None and not isinstance(self.wire_dtype, torch.dtype):
            raise TypeError(f"wire_dtype: expected a torch.dtype or None, got {self.wire_dtype!r}")
        if not isinstance(self.policy, str):
            raise TypeError(f"policy: expected the name of a wrap policy, got {self.policy!r}")
        kept = self.reshard_after_forward
        if kept is not None and not isinstance(kept, (bool, int)):
            raise TypeError(f"reshard_after_forward: expected a bool, an int or None, got {kept!r}")
        if isinstance(kept, int) and not isinstance(kept, bool) and (kept < 1 or self.num_shards % kept):
            raise ValueError(
                f"reshard_after_forward: expected a divisor of the {self.num_shards} ranks that shard, got {kept}"
            )
        self._check_what_rests()

    def _check_what_rests(self) -> None:
        is_int = isinstance(self.reshard_after_forward, int) and not isinstance(self.reshard_after_forward, bool)
        budget, names = self.offload_budget, cast("Any", self.by_rows)
        if (
            not isinstance(names, Iterable)
            or isinstance(names, str)
            or not all(isinstance(each, str) for each in names)
        ):
            raise TypeError(f"by_rows: expected names of embeddings, got {names!r}")
        object.__setattr__(self, "by_rows", tuple(names))
        if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int)):
            raise TypeError(f"offload_budget: expected an int or None, got {budget!r}")
        if budget is not None and (budget < 0 or not self.offload):
            raise ValueError(f"offload_budget: expected bytes beside offload=True, got {budget}, {self.offload}")
        if self.shard_at_rest and (self.replicas == 1 or self.num_shards == 1 or is_int):
            raise ValueError(
                "shard_at_rest: expected several replicas of several ranks, and no int for reshard_after_forward, got "
                f"{self.replicas} of {self.num_shards}, {self.reshard_after_forward}"
            )
        if self.beside_forward and (self.offload or self.offload_states):
            raise ValueError("beside_forward: expected neither offload nor offload_states: such steps are not late")

    def chosen(self, policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
        """Returns the policy of a call under this setting: it has the wire dtype of the setting, if that has one, and
        no compression of sums between replicas where there are none.
        """
        given = policy.compression
        sent = given.reduce_scatter if self.wire_dtype is None else self.wire_dtype
        all_reduce = given.all_reduce if self.replicas > 1 else None
        return replace(policy, compression=Compression(given.all_gather, sent, all_reduce))

    @property
    def num_shards(self) -> int:
        """How many ranks share one copy of the parameters."""
        return self.ranks // self.replicas

    @property
    def num_at_rest(self) -> int:
        """Among how many ranks shards, gradients and optimizer states are cut."""
        return self.ranks if self.shard_at_rest else self.num_shards


def candidates(
    ranks: Sequence[int], policies: Iterable[str], offloads: bool, ranks_per_machine: int, joins: bool
) -> list[Setting]:
    """Returns the settings that a plan compares if the user names none. `offloads`: also with CPU offload. `joins`:
    also with several blocks in one call, on several machines.
    """
    found = []
    for policy, world in product(policies, ranks):
        machines = world // ranks_per_machine if world % ranks_per_machine == 0 else 1
        meshes: list[tuple[int, bool | int | None]] = [(1, None), (1, False)]
        if machines > 1:
            meshes += [(machines, None), (1, ranks_per_machine)]
        choices = (False, True) if offloads else (False,)
        for (replicas, kept), again, offload in product(meshes, (False, True), choices):
            found.append(Setting(world, kept, replicas, again, offload, policy=policy))
        for count, again, offload in product((2, 4) if joins and machines > 1 else (), (False, True), choices):
            found.append(Setting(world, None, 1, again, offload, policy=policy, blocks_per_call=count))
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
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f'{name}: expected a number or a text like "24GB", got {type(value).__name__}')
    if not value > 0:
        raise ValueError(f"{name}: expected more than 0, got {value}")
    return float(value)


def read_latency(value: Any, default: Latency) -> Latency:
    """Returns the latency of collectives: of a number of seconds or a text such as "20us", or of three of them.

    Raises:
        TypeError, ValueError: it is neither.
    """
    if value is None:
        return default
    parts = [*value] if isinstance(value, (list, tuple)) else [value]
    if len(parts) not in (1, 3):
        raise ValueError(
            f"latency: expected one time, or three (the base, a hop inside a machine, one between two), got {value!r}"
        )
    return Latency(*map(_read_seconds, parts))


def _read_seconds(value: Any) -> float:
    if isinstance(value, str):
        found = re.fullmatch(r"\s*([\d.]+(?:e[+-]?\d+)?)\s*(s|ms|us|ns|)\s*", value, re.IGNORECASE)
        if found is None:
            raise ValueError(f'latency: expected a number of seconds or a text like "20us", got {value!r}')
        value = float(found[1]) * _SECONDS[found[2].lower()]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f'latency: expected a number of seconds or a text like "20us", got {type(value).__name__}')
    if not 0 <= value < float("inf"):
        raise ValueError(f"latency: expected 0 seconds or more, got {value}")
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
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"optimizer: expected a name or a number of bytes, got {type(value).__name__}")
    if value < 0:
        raise ValueError(f"optimizer: expected 0 bytes for each element or more, got {value}")
    return float(value)
