"""Defines a user's choices (policies of a `fully_shard` call, settings of a group and of a root), and the phases of a
group.

Settings are frozen: one changes by putting another object in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum, auto
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .codec import AS_IS, Cast, Codec, Compression, is_compressed

if TYPE_CHECKING:
    from ..codecs.comm_hook import CommHook
    from ..collectives.choose import CommChoice
    from .group import FSDPParamGroup


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Chooses the dtypes in which a group computes and communicates. Sharded parameters keep their own dtype.

    Args:
        param_dtype: dtype of the unsharded parameters, hence of the all-gather and of compute. None: the dtype of the
            sharded parameter. Parameters that are not floating point are never cast.
        reduce_dtype: dtype in which gradients are reduced. None: the parameter's `grad_dtype`, which is its own dtype
            unless the user has set another (fp32 parameters that compute in bf16 are reduced in fp32), as in torch from
            2.15 on; torch 2.13 reduces in `param_dtype`.
        grad_dtype: dtype of `.grad` of floating-point parameters, and the one in which autograd accumulates their
            gradients before these are reduced: fp32 gradients of bf16 weights. None: each parameter's own `grad_dtype`,
            which is its dtype unless the user has set another; where that was set, it counts and not this.
            `reduce_dtype=None` then reduces in it.
        output_dtype: floating-point tensors in the module's output are cast to it. None: they are left alone.
        cast_forward_inputs: cast floating-point tensors in the module's inputs to `param_dtype`. Without a
            `param_dtype` nothing is cast. Whole numbers that the cast would change (positions, time steps) raise a
            RuntimeError on every rank.
        param_dtype_override_fn: called once with each parameter. If it returns the parameter's own dtype, the
            parameter is gathered and used in that dtype; None or `param_dtype` means: like the others. It must return
            the same on all ranks.
        compression: how weights and gradients are compressed while they are sent. By default they are not, and are sent
            in the dtypes above.
        buffer_dtype: dtype to which `fully_shard` casts the floating-point buffers of the modules of this call; and the
            next forward those that were put in their place. None: they keep their own. State dicts have and take
            buffers in their own dtype, with exact values, which stay in memory for that; but what was written to a
            buffer since (running statistics) has been rounded. Whole numbers, flags, complex numbers and buffers that
            require a gradient are left alone, and so are modules in `ignored_params`.

    Raises:
        TypeError: a dtype is not a torch.dtype, or `compression` is no Compression.
        ValueError: a dtype is not a (real) floating-point dtype of 16 bits or more; a dtype in `compression` is neither
            narrower than `param_dtype` (`all_gather`) or `reduce_dtype` (gradients) nor equal to it.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    # A function need not be hashable; policies are, by the rest.
    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = field(
        default=None, kw_only=True, hash=False
    )
    compression: Compression = field(default=Compression(), kw_only=True)
    buffer_dtype: torch.dtype | None = field(default=None, kw_only=True)
    grad_dtype: torch.dtype | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        where, choose = "MixedPrecisionPolicy", self.param_dtype_override_fn
        if choose is not None and not callable(choose):
            raise TypeError(f"{where}.param_dtype_override_fn: expected a function or None, got {choose!r}")
        if not isinstance(self.cast_forward_inputs, bool):
            raise TypeError(f"{where}.cast_forward_inputs: expected a bool, got {self.cast_forward_inputs!r}")
        for name in ("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype", "grad_dtype"):
            dtype = getattr(self, name)
            if dtype is None:
                continue
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"{where}.{name}: expected a torch.dtype or None, got {dtype!r}")
            if not dtype.is_floating_point or dtype.itemsize < 2:
                raise ValueError(f"{where}.{name}: expected a floating-point dtype of 16 bits or more, got {dtype}")
        if not isinstance(self.compression, Compression):
            raise TypeError(f"{where}.compression: expected a fsdp2.compression.Compression, got {self.compression!r}")
        compression = self.compression
        for codec, name, limit in (
            (compression.all_gather, "all_gather", "param_dtype"),
            (compression.reduce_scatter, "reduce_scatter", "reduce_dtype"),
            (compression.all_reduce, "all_reduce", "reduce_dtype"),
        ):
            widest = getattr(self, limit)
            if type(codec) is Cast and widest and codec.dtype != widest and codec.dtype.itemsize >= widest.itemsize:
                raise ValueError(
                    f"{where}.compression: expected as {name} a dtype narrower than {limit}, or that, {widest}, got "
                    f"{codec.dtype}"
                )

    def keeps_dtype(self, parameter: nn.Parameter) -> bool | None:
        """Returns True if `parameter` computes in its own dtype, because the user's function says so; False if that
        function says `param_dtype`; None if it says nothing.

        Raises:
            ValueError: the user's function returned a third dtype.
        """
        if self.param_dtype_override_fn is None:
            return None
        dtype = self.param_dtype_override_fn(parameter)
        if dtype not in (None, self.param_dtype, parameter.dtype):
            raise ValueError(
                f"expected param_dtype_override_fn to return {parameter.dtype}, {self.param_dtype} or None, got "
                f"{dtype!r}"
            )
        return None if dtype is None else dtype == parameter.dtype

    def compute_dtype(self, stored: torch.dtype) -> torch.dtype:
        """Returns the dtype in which a parameter stored as `stored` is gathered and used."""
        return self.param_dtype if self.param_dtype and stored.is_floating_point else stored

    def gather_codec_for(self, stored: torch.dtype, shape: Sequence[int]) -> Codec | None:
        """Returns how a parameter of that shape that is stored as `stored` is sent in a gather. None: in the dtype in
        which it computes.
        """
        codec = self.compression.all_gather
        if codec is None or not stored.is_floating_point:
            return None
        return codec if is_compressed(codec, shape, self.compute_dtype(stored)) else None

    def gradient_dtype(self, stored: torch.dtype) -> torch.dtype:
        """Returns the dtype in which a gradient is reduced. `stored`: the dtype of `.grad`, which is that of the
        parameter unless another was chosen.
        """
        return self.reduce_dtype or stored

    def codec_for(
        self, stored: torch.dtype, computed: torch.dtype | None = None, shape: Sequence[int] | None = None
    ) -> Codec:
        """Returns how that gradient is sent.

        `computed`: the dtype in which autograd computes the gradient, if it may be sent in that dtype. `shape`: that of
        the parameter. None: it is large.
        """
        codec, summed = self.compression.reduce_scatter, self.gradient_dtype(stored)
        if type(codec) is not Cast and (codec is None or not is_compressed(codec, shape, summed)):
            codec = None if computed is None else Cast(computed)
        return codec if codec is not None and is_compressed(codec, shape, summed) else AS_IS

    def sent_dtype(self, stored: torch.dtype, computed: torch.dtype | None = None) -> torch.dtype:
        """Returns the dtype in which that gradient is packed: narrower than the one it is summed in, or equal to it.
        It is sent in that dtype, unless a codec encodes it.
        """
        return self.codec_for(stored, computed).packed_dtype(self.gradient_dtype(stored))


@dataclass(frozen=True)
class OffloadPolicy:
    """Keeps sharded parameters, gradients and optimizer states on the mesh's device. See `CPUOffloadPolicy`."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Keeps sharded parameters, gradients and optimizer states on the CPU.

    Args:
        pin_memory: use page-locked memory, from which copies to an accelerator run asynchronously. On a mesh of CPUs
            nothing is copied, and no memory is locked.

    Raises:
        TypeError: `pin_memory` is not a bool.
    """

    pin_memory: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.pin_memory, bool):
            raise TypeError(f"CPUOffloadPolicy.pin_memory: expected a bool, got {self.pin_memory!r}")


class OffloadBudget:
    """Keeps up to `nbytes` of sharded parameters on the mesh's device, and the others on the CPU.

    Give one object to all `fully_shard` calls of a model: they share the budget, in their order. The parameters of a
    call stay on the device if all of their shards fit into what is left; else they are on the CPU, with their
    gradients and optimizer states, as with `CPUOffloadPolicy`. Every rank decides alike, from shapes alone. An object
    serves one model: make another for another model.

    Args:
        nbytes: bytes of shards that stay on the device of each rank. It counts the sharded parameters alone, in the
            dtypes in which they are stored; their gradients and optimizer states are on the device besides.
        pin_memory: see `CPUOffloadPolicy`.

    Attributes:
        left: the bytes of the budget that no call has taken yet.

    Raises:
        TypeError: `nbytes` is not an int, or `pin_memory` not a bool.
        ValueError: `nbytes` is negative.
    """

    def __init__(self, nbytes: int, *, pin_memory: bool = True) -> None:
        if not isinstance(nbytes, int) or isinstance(nbytes, bool):
            raise TypeError(f"OffloadBudget.nbytes: expected an int, got {nbytes!r}")
        if nbytes < 0:
            raise ValueError(f"OffloadBudget.nbytes: expected a number of bytes of at least 0, got {nbytes}")
        check_bool("OffloadBudget.pin_memory", pin_memory)
        self.nbytes, self.pin_memory = nbytes, pin_memory
        self.left = nbytes

    def _take(self, nbytes: int) -> None:
        """Takes bytes of what is left: a call has sharded parameters of that size."""
        self.left -= nbytes

    def __repr__(self) -> str:
        return f"OffloadBudget({self.nbytes}, pin_memory={self.pin_memory})"


class Phase(Enum):
    """Where the parameters of a group are."""

    # The phases that may follow, by TRANSITIONS.
    may_become: tuple[Phase, ...]

    SHARDED = "sharded"  # only shards are there
    GATHERING = "gathering"  # an all-gather is in flight
    GATHERED = "gathered"  # the unsharded parameters' data is there, and modules have the sharded parameters
    UNSHARDED = "unsharded"  # modules have the unsharded parameters
    COPIED = "copied"  # modules have copies (full_params), and the group can't be gathered
    SECONDARY = "secondary"  # shards are there, and secondary shards, from which the next gather is


class KeepUntil(IntEnum):
    """How long the unsharded parameters of a group stay."""

    END_OF_USE = 0  # no longer than the forward or backward that uses them
    BACKWARD = 1  # until the backward of the forward that has left them
    NEXT_PASS = 2  # until a parameter changes, or a pass ends that reshards
    USER = 3  # until the user calls `reshard`, or a pass with grad ends that reshards


class Demand(Enum):
    """What needs an all-gather that begins."""

    AHEAD = auto()  # modules that run later, perhaps on another stream
    NOW = auto()
    OTHERS = auto()  # other ranks: the group gathers although its parameters are there


class AfterForward(Enum):
    """What stays of the unsharded parameters of a group after a forward."""

    FREE = auto()  # nothing
    KEEP = auto()  # all of them
    SECONDARY = auto()  # 1/k of them on each rank: secondary shards


class Ending(Enum):
    """How a forward, or a block of full_params, has ended."""

    TRAINING = auto()  # a backward follows
    EVALUATION = auto()  # none follows
    FAILED = auto()  # with an error, after which none of the unsharded parameters may stay


SHARDED, GATHERING, GATHERED, UNSHARDED, COPIED, SECONDARY = Phase

TRANSITIONS: dict[Phase, tuple[Phase, ...]] = {
    SHARDED: (GATHERING, COPIED),
    GATHERING: (GATHERED, SHARDED),
    GATHERED: (UNSHARDED, SHARDED, SECONDARY, GATHERING),
    UNSHARDED: (GATHERED,),
    COPIED: (SHARDED,),
    SECONDARY: (GATHERING, SHARDED),
}
"""Phase -> the phases that may follow. What is gathered is gathered again if other ranks need its shards once more."""

for _phase, _later in TRANSITIONS.items():
    _phase.may_become = _later  # to look them up would call Enum.__hash__


class ReduceWhen(Enum):
    """When a group's gradients are reduced in backward."""

    BUCKET = auto()  # a bucket, as soon as its gradients are complete
    GROUP = auto()  # all buckets, when all gradients are complete
    ASKED = auto()  # like GROUP, and an extension reduces them on ranks that have none, if another rank has some


@dataclass(frozen=True)
class GroupSettings:
    """The settings of one group, by `fully_shard` and by methods of FSDPModule, which name each field."""

    # Dtypes of compute and reduction.
    policy: MixedPrecisionPolicy = MixedPrecisionPolicy()
    # As the user has chosen it. True: free the unsharded parameters after forward. None: except for the root, and for
    # what backward needs first. An int k: keep 1/k of them on each rank.
    reshard_after_forward: bool | int | None = None
    # Free the unsharded parameters after backward.
    reshard_after_backward: bool = True
    # Gather when backward reaches the module; else only when a parameter is read.
    unshard_in_backward: bool = True
    # The groups to gather ahead, instead of the recorded order.
    forward_prefetch: tuple[FSDPParamGroup, ...] | None = None
    backward_prefetch: tuple[FSDPParamGroup, ...] | None = None
    # Reduce in the next backward passes. False: accumulate unsynchronized gradients.
    reduce_gradients: bool = True
    # Also sum between replica groups in the next backward passes.
    all_reduce: bool = True
    # Reduce zeros for parameters without a gradient.
    reduce_unused: bool = False
    # Chosen by extensions.
    reduce_when: ReduceWhen = ReduceWhen.BUCKET
    # How large the buckets of gradients are. None: as buckets.py chooses for the device.
    bucket_bytes: int | None = None
    # How many reductions may be in flight while the next is packed. None: one.
    max_reductions: int | None = None
    # What the sum over all ranks is divided by. None: their number.
    divide_factor: float | None = None
    # Divides each flat tensor of complete sums, in place, by a number that is not known before; in place of
    # `divide_factor`. While `all_reduce` is False, shards then wait for a later reduction on any mesh.
    divide_late: Callable[[Tensor], None] | None = None
    # Called with each reduced flat tensor, in the reduce dtype.
    reduce_hook: Callable[[Tensor], None] | None = None
    # How replicas sum, as a user's hook does, in place of the policy's compression; without replicas, how the ranks
    # that shard do.
    comm_hook: CommHook | None = None
    # Keep the memory of the unsharded parameters when they are resharded.
    keep_storage: bool = False
    # Free it although something outside the engine has kept a view of it.
    free_viewed_storage: bool = False
    # Keep offloaded shards in page-locked memory.
    pin_memory: bool = False
    # Ranks may leave the group's module out (features/conditional.py).
    conditional: bool = False
    # The group is not gathered: its module looks rows up (features/vocab_parallel.py).
    vocab_parallel: bool = False
    # How the group communicates, where a user has chosen that (collectives/choose.py).
    collectives: CommChoice | None = None
    # A StepsInBackward (features/optimizer_in_backward.py), which copies do not get.
    optimizer_in_backward: object | None = None
    # What `reshard_after_forward` says. None: what backward needs first stays.
    after_forward: AfterForward | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "after_forward", _meaning_of(self.reshard_after_forward))

    @property
    def secondary_size(self) -> int | None:
        """Among how many ranks secondary shards are cut. None: there are none."""
        return self.reshard_after_forward if self.after_forward is AfterForward.SECONDARY else None


def _meaning_of(reshard_after_forward: bool | int | None) -> AfterForward | None:
    if reshard_after_forward is None:
        return None
    if isinstance(reshard_after_forward, bool):
        return AfterForward.FREE if reshard_after_forward else AfterForward.KEEP
    return AfterForward.KEEP if reshard_after_forward == 1 else AfterForward.SECONDARY


@dataclass(frozen=True)
class RootSettings:
    """The settings of all groups under one root, by the methods of FSDPModule."""

    # Bytes of unsharded parameters that may be there besides the groups in use: gathered ahead, or kept for later uses.
    # None: one group of any size is gathered ahead, or several that together are no larger than a typical one.
    unsharded_budget: int | None = None
    # Forget which forwards have run when a backward ends.
    is_last_backward: bool = True
    # Finish the reductions at the end of each backward.
    finalize_backward: bool = True
    # Running statistics of BatchNorm are those of all ranks (features/running_stats.py).
    averages_running_stats: bool = True


def check_bool(name: str, value: object) -> None:
    """Raises TypeError if `value` is not a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected a bool, got {value!r}")
