"""Holds the encoders of a group's gradients, and its sum between replicas, with all that these keep between steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, final

import torch

from .codec import IN_PAIRS, Codec, Encoder, ReplicaSum

if TYPE_CHECKING:
    from .policy import GroupSettings, MixedPrecisionPolicy


@final
class GradientCodecs:
    """What encodes the gradients of one group, and what sums them between replicas.

    GroupGradients chooses both when settings or parameters change, and plans reductions by them.
    `fsdp2.checkpoint` saves what they keep.
    """

    def __init__(self) -> None:
        self.encoders: dict[Codec, Encoder] = {}
        """By codec: residuals of codecs with feedback, and numbers for rounding at random."""
        self.replica_sum: ReplicaSum | None = None
        """How replicas sum those gradients that it holds for. None: all by one collective."""
        # The choices that `replica_sum` was made for, and its name for errors.
        self._chosen: object = None
        self._name_of_sum = ""

    def choose_sum(
        self, policy: MixedPrecisionPolicy, settings: GroupSettings, has_replicas: bool, name: str
    ) -> ReplicaSum | None:
        """Makes the sum between replicas, unless the one that is there was made for the same choices, and returns it.

        `name`: differs between groups and ranks, so that they round differently.
        """
        codec, hook = policy.compression.all_reduce, settings.comm_hook
        if (codec, hook, has_replicas) != self._chosen:
            self._chosen, self.replica_sum = (codec, hook, has_replicas), None
            if has_replicas and (codec is not None or hook is not None):
                from ..codecs.choose_sum import replica_sum_of  # a plain training needs no such sum

                self.replica_sum = replica_sum_of(policy, hook, name)
            self._name_of_sum = hook.name if hook is not None else repr(codec)
        return self.replica_sum

    def use(self, codecs: Iterable[Codec], name: str) -> None:
        """Encodes by these codecs from now on. Encoders that are there stay. `name`: as for `choose_sum`."""
        self.encoders = {codec: self.encoders.get(codec) or Encoder(codec, name) for codec in codecs}

    @staticmethod
    def in_tree(policy: MixedPrecisionPolicy, has_replicas: bool) -> tuple[Encoder, ReplicaSum | None]:
        """Returns what encodes gradients, and what sums them between replicas, if all ranks add them up in the order of
        one tree. Neither keeps anything.
        """
        from ..codecs.choose_sum import sum_in_pairs

        return Encoder(IN_PAIRS), sum_in_pairs(policy) if has_replicas else None

    @property
    def nbytes(self) -> int:
        """Bytes that codecs with feedback, and sums between replicas, keep between steps."""
        of_sum = 0 if self.replica_sum is None else self.replica_sum.nbytes
        return of_sum + sum(encoder.nbytes for encoder in self.encoders.values())

    def discard(self) -> None:
        """Drops what is kept between steps: a parameter was replaced, or a backward pass has failed."""
        for encoder in self.encoders.values():
            encoder.discard()
        if self.replica_sum is not None:
            self.replica_sum.discard()

    def description(self) -> dict[str, Any]:
        """Returns which codecs keep something: what they have saved holds for equal ones."""
        return {"codecs": [repr(codec) for codec in self.encoders], "sums between replicas": self._name_of_sum}

    def kept_state(self) -> dict[str, Any]:
        """Returns copies, on the CPU, of what is kept between steps."""
        return {
            "encoders": [encoder.kept_state() for encoder in self.encoders.values()],
            "summing": {} if self.replica_sum is None else self.replica_sum.kept_state(),
        }

    def load_kept(self, state: dict[str, Any], device: torch.device) -> None:
        """Takes what `kept_state` has returned for codecs of the same description."""
        for encoder, saved in zip(self.encoders.values(), state["encoders"], strict=True):
            encoder.load_kept(saved, device)
        if self.replica_sum is not None:
            self.replica_sum.load_kept(state["summing"], device)
