"""The protocol of tools: what a tool may know of a sharded module and do to it, whichever library has sharded it.

`shards_of(module)` (find.py) returns a `Shards`: the groups in the module, and their parameters. It takes modules that
fsdp2 has sharded, and those that torch's own `torch.distributed.fsdp.fully_shard` has. All tools of fsdp2 stand on it,
so that they work on both:

```python
shards = shards_of(model)
for group in shards.groups:
    print(group.name, group.ranks.num_shards)
    for param in group.params:
        print(param.name, param.shape, param.box, param.local.shape)  # the box of the whole that is here
    wholes = group.copy_whole()  # every rank calls it
```

Attributes that only one of the two can answer say so, and are None for the other. Nothing here communicates, except
where "every rank must call it" is written. Ask between steps: neither a forward nor a backward may run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["Cut", "GroupFacts", "Place", "Ranks", "ShardGroup", "ShardParam", "Shards"]


@dataclass(frozen=True)
class Ranks:
    """Describes the ranks that share or replicate one group's parameters.

    Args:
        device: the device of this rank on which parameters are gathered and computed with.
        axis_groups: this rank's process group along each mesh axis on which other ranks share or replicate them.
        members: the global ranks, this one included.
        num_shards: how many ranks share one copy of the parameters.
        is_first: True on the first of all these ranks.
    """

    device: torch.device
    axis_groups: tuple[dist.ProcessGroup, ...]
    members: frozenset[int]
    num_shards: int
    is_first: bool

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return len(self.members)

    @property
    def num_replicas(self) -> int:
        """How many copies of the parameters there are among them."""
        return self.num_ranks // max(1, self.num_shards)


class Cut(NamedTuple):
    """How the ranks of one process group share a value: in consecutive chunks along one dim, as `torch.chunk`
    makes them. The last ranks' chunks may be shorter, or empty.

    Args:
        group: the process group.
        dim: the dim along which the value is cut.
        shape: the shape of the value before the cut.
        size: how many ranks share it.
        rank: this rank's index among them.
    """

    group: dist.ProcessGroup
    dim: int
    shape: tuple[int, ...]
    size: int
    rank: int

    @property
    def chunk(self) -> int:
        """How many indices along `dim` a whole chunk has."""
        return -(-self.shape[self.dim] // self.size)

    @property
    def chunk_numel(self) -> int:
        """How many elements a whole chunk has: the same on every rank, those whose chunk is shorter included."""
        return self.chunk * math.prod((*self.shape[: self.dim], *self.shape[self.dim + 1 :]))

    def chunk_shape(self, rank: int | None = None) -> tuple[int, ...]:
        """Returns the shape of a rank's chunk. None: of this rank's."""
        first, end = self.bounds(rank)
        return (*self.shape[: self.dim], end - first, *self.shape[self.dim + 1 :])

    def bounds(self, rank: int | None = None) -> tuple[int, int]:
        """Returns the first index along `dim` that a rank holds, and the one after its last. None: this rank."""
        length, number = self.shape[self.dim], self.rank if rank is None else rank
        return min(number * self.chunk, length), min((number + 1) * self.chunk, length)


class Place(NamedTuple):
    """The place of a parameter's local tensor in memory that it shares with others.

    Args:
        memory: that memory, as bytes.
        offset: its first byte there.
        order: how many parameters lie before it.
        is_current: returns False once the group has put its shards elsewhere.
    """

    memory: Tensor
    offset: int
    order: int
    is_current: Callable[[], bool]


@dataclass(frozen=True)
class GroupFacts:
    """What `describe` shows of a group.

    Args:
        cls: the name of the class of its first module, before it was sharded.
        modules: FQNs of its modules; "root" for the module that `shards_of` was called with.
        parameters: the parameters, in the order in which they are gathered: FQNs, of tied ones the first.
        num_frozen: how many of these do not require a gradient.
        numel: elements of all whole parameters (fsdp2, under tensor parallelism: of those that the ranks share).
        stored: the dtypes in which parameters are stored.
        computed, reduced, sent: the dtypes of parameters in forwards, of sums of gradients, and of gradients on their
            way. None: unknown, for torch's FSDP2 does not tell its policy.
        gathered_nbytes, reduced_nbytes: bytes of the unsharded parameters with padding, and of the gradients as they
            travel. None: unknown.
        padding_nbytes: bytes that all ranks together send besides the parameters in one gather; on torch's FSDP2, in
            the dtypes of stored parameters.
        settings: what was chosen for the group, and differs from the default, as text. None: unknown.
    """

    cls: str
    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    num_frozen: int
    numel: int
    stored: tuple[torch.dtype, ...]
    computed: tuple[torch.dtype, ...] | None
    reduced: tuple[torch.dtype, ...] | None
    sent: tuple[torch.dtype, ...] | None
    gathered_nbytes: int | None
    reduced_nbytes: int | None
    padding_nbytes: int
    settings: tuple[str, ...] | None


class ShardParam(Protocol):
    """One distinct parameter, however often it is registered. Two of the same parameter are equal."""

    @property
    def names(self) -> Sequence[str]:
        """Its FQNs in the module that `shards_of` was called with; several if it is tied."""

    @property
    def name(self) -> str:
        """The first of its FQNs."""

    @property
    def group(self) -> ShardGroup:
        """The group that it is gathered with."""

    @property
    def slots(self) -> Sequence[tuple[nn.Module, str]]:
        """The modules that have it registered, and its name in each."""

    @property
    def parameter(self) -> nn.Parameter:
        """The sharded parameter, a DTensor: what optimizers hold, and `model.parameters()` yields between steps."""

    @property
    def registered(self) -> Tensor:
        """Returns what a user has registered in the place of `parameter` since `settle`; else `parameter`, also while
        modules have an unsharded parameter or a copy.
        """

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole parameter."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which it is stored."""

    @property
    def local(self) -> Tensor:
        """This rank's part: a plain tensor over the memory of the shard, so that a write changes the parameter.

        Call `before_write()` of `fsdp2.shards.find` before you write to it, and
        `torch.autograd.graph.increment_version` behind writes that do not go through this tensor.
        """

    @property
    def grad(self) -> Tensor | None:
        """This rank's part of `parameter.grad`: a plain tensor over its memory, or None."""

    @property
    def is_unsynchronized(self) -> bool:
        """True while its gradient is still to be reduced, between the micro-batches of an accumulation. Always False
        on torch's FSDP2, which keeps such gradients to itself.
        """

    @property
    def version(self) -> int:
        """A number that changes when the parameter or its local tensor is written to."""

    @property
    def cuts(self) -> Sequence[Cut]:
        """How ranks share it, from the innermost cut to the outermost: gathering `local` over the ranks of the first
        gives the value of that cut's shape, and so on up to the whole. Empty: each rank has all of it.
        """

    @property
    def replicas(self) -> Sequence[dist.ProcessGroup]:
        """The process groups, one for each mesh axis, whose ranks hold the same part."""

    @property
    def box(self) -> tuple[slice, ...]:
        """One slice for each dim: `whole[param.box]` is what this rank holds of the whole parameter."""

    @property
    def place(self) -> Place | None:
        """The place of `local` among the shards of its group. None: it lies alone, as all of torch's FSDP2 do."""

    @property
    def gathers_itself(self) -> bool:
        """True if its class has methods of its own to be gathered by (`fsdp_pre_all_gather`): tools can't gather it."""

    @property
    def is_stepped_in_backward(self) -> bool:
        """True if backward steps an optimizer on it (`set_optimizer_in_backward`), which only fsdp2 does."""

    def part_of(self, value: Tensor) -> Tensor:
        """Returns this rank's part, a view, of a value as `ShardGroup.copy_whole` returns it, or of the whole."""

    def as_parameter(self, value: Tensor) -> nn.Parameter:
        """Returns a parameter without gradient, of the class that modules have registered while they compute, over
        `value`, which has the shape that `ShardGroup.copy_whole` returns.
        """

    def register(self, parameter: nn.Parameter) -> None:
        """Registers `parameter` in all `slots`."""

    def empty(self, device: torch.device) -> Tensor:
        """Returns a tensor like `parameter`, with memory on `device` that holds no values: for `module._apply` to put
        in the place of one on meta.
        """


class NotedValues(NamedTuple):
    """Numbers that a library has noted of a whole parameter when it cut it, to compare ranks by.

    Args:
        param: the parameter.
        values: the numbers.
        keep: call it when `values` were changed, to those of another rank for example.
    """

    param: Any
    values: Tensor
    keep: Callable[[], None]


class ShardGroup(Protocol):
    """The parameters that one `fully_shard` call has sharded, and gathers together. Two of the same group are equal."""

    @property
    def name(self) -> str:
        """FQN of its first module; "root" for the module that `shards_of` was called with."""

    @property
    def modules(self) -> Sequence[nn.Module]:
        """The modules that the call got."""

    @property
    def is_root(self) -> bool | None:
        """True if they are the outermost sharded module of their model. None: torch's FSDP2 knows from the first
        forward on.
        """

    @property
    def params(self) -> Sequence[ShardParam]:
        """Its parameters, in their order."""

    @property
    def ranks(self) -> Ranks:
        """The ranks that share or replicate its parameters."""

    @property
    def is_foreign(self) -> bool:
        """True if another library than fsdp2 has sharded it: some attributes are None, and forwards may leave plain
        parameters registered until `settle`.
        """

    @property
    def in_use(self) -> str | None:
        """The use of the parameters now: "forward", "backward", "copies"; or None. torch's FSDP2 tells of backward
        and of copies only.
        """

    def settle(self, *, reshard: bool = True, may_be_meta: bool = True, may_be_untied: bool = False) -> None:
        """Registers the sharded parameters, and takes what users have registered in place of them. Call it between
        steps, before anything else, if a forward may have left parameters unsharded.

        Args:
            reshard: free what is unsharded, too. False: only where something was replaced.
            may_be_meta: parameters may be on the meta device.
            may_be_untied: tied parameters may have become several.
        """

    @property
    def input_dtype(self) -> torch.dtype | None:
        """The dtype to which forwards cast floating-point inputs. None: to none, or unknown (torch's FSDP2)."""

    @property
    def settings_text(self) -> str:
        """Settings of the group that must be alike on all ranks, as text; empty on torch's FSDP2."""

    def find_computed(self) -> tuple[torch.dtype, ...]:
        """Returns the dtypes of parameters in forwards. Every rank must call it: torch's FSDP2 gathers them to see."""

    def facts(self) -> GroupFacts:
        """Returns what there is to show of the group."""

    def before_read(self) -> None:
        """Call it before local tensors are read: waits for a copy of them that is on its way, for example."""

    def versions(self) -> tuple[int, ...]:
        """Returns numbers of which one changes when a parameter of the group is written to."""

    def copy_whole(self, params: Sequence[ShardParam] | None = None, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Returns whole parameters in new memory, on `ranks.device`. Every rank of the group must call it.

        On fsdp2, under tensor parallelism, these are the parts that modules compute with; on torch's FSDP2 the wholes.

        Args:
            params: some of the group's; None: all.
            dtype: the dtype of floating-point parameters; None: that in which they are stored.
        """

    def note_loaded(self) -> None:
        """Call it when weights were loaded, on every rank: ranks of fsdp2 then compare theirs anew."""

    def noted_values(self) -> Sequence[NotedValues]:
        """Returns what was noted of the whole weights from which shards were cut; nothing on torch's FSDP2."""

    def begin_copies(self) -> None:
        """Has the modules of the group refuse to run, because their slots are about to hold copies."""

    def end_copies(self) -> None:
        """Ends that."""

    @property
    def unsharded(self) -> Unsharded | None:
        """A context in which unsharded parameters of several groups are registered and differentiable; it yields
        (ShardParam) -> unsharded parameter. None on torch's FSDP2, whose gradients would not be reduced.
        """


# (groups) -> a context that yields (ShardParam) -> the unsharded parameter.
Unsharded = Callable[[Sequence[Any]], AbstractContextManager[Callable[[Any], nn.Parameter]]]


class Shards(Protocol):
    """The sharded parameters of a module, see `shards_of`."""

    @property
    def groups(self) -> Sequence[ShardGroup]:
        """The groups of sharded modules in the module, the outermost first, in the order of the model."""

    def names(self) -> dict[str, ShardParam]:
        """Returns each FQN in the module -> its parameter. A tied parameter has several."""

    def find(self, tensor: Tensor) -> ShardParam | None:
        """Returns the parameter that `tensor` is: the sharded one, or what modules have registered meanwhile. Also one
        that a module around this one manages. None: nothing manages it.
        """

    def unwritten(self) -> Sequence[Tensor]:
        """Returns the parameters and buffers that nothing has written to since `to_empty` gave them memory, as far as
        version counters tell. Empty on torch's, which does not notice.
        """

    def note_emptied(self, buffers: Sequence[Tensor]) -> None:
        """Call it when buffers got memory without values: fsdp2 then refuses a forward before something has written."""

    def frozen_writes(self) -> dict[str, bool]:
        """Returns the FQN of each frozen parameter -> True if this rank has written to it since ranks last compared
        them. Empty on torch's, where ranks compare nothing.
        """

    def finish_gradients(self) -> None:
        """Finishes reductions that are still running behind a backward."""

    def drop(self, after_error: bool) -> None:
        """Drops unsynchronized gradients, and after an error all that was under way: the next pass begins anew. torch's
        FSDP2 can drop nothing but what `reset_iter_state` drops, from 2.13 on.
        """
