"""Chooses how replicas sum the gradients of a group, if not by one collective."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..engine.codec import IN_PAIRS, Encoder, ReplicaSum
from .encoded_sum import EncodedSum

if TYPE_CHECKING:
    from ..engine.policy import MixedPrecisionPolicy


def replica_sum_of(policy: MixedPrecisionPolicy, hook: ReplicaSum | None, name: str) -> ReplicaSum | None:
    """Returns how replicas sum the gradients of a group. None: by one collective, in the reduce dtype.

    `name`: differs between groups and ranks, so that they round differently.
    """
    codec: Any = policy.compression.all_reduce
    if hook is not None or codec is None:
        return hook
    if hasattr(codec, "make_sum"):
        made: ReplicaSum = codec.make_sum()
        return made
    return EncodedSum(Encoder(codec, f"replicas {name}"), policy) if codec.exchanges else None


def sum_in_pairs(policy: MixedPrecisionPolicy) -> ReplicaSum:
    """Returns a sum between replicas that adds neighbours first, then the sums of neighbouring pairs, and so on."""
    return EncodedSum(Encoder(IN_PAIRS), policy)
