"""Looks rows of an embedding up at the ranks that own them, in place of gathering the whole table
(`vocab_parallel_embedding`).

Each rank sends each of its ids to the rank whose shard has that row, and receives the row, in the compute dtype. In
backward each rank sends the gradients of its rows the same way. The owner sums them in the reduce dtype, and autograd
accumulates the sum, which is this rank's shard of the gradient, into `.grad` of the sharded parameter.

The table is the only parameter of a group like any other, so that optimizers, state dicts and tools see it as they see
all parameters. But its module runs without the engine: no forward or backward gathers the group, or reduces it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..calls.user_code import hides_modes
from ..collectives.choose import choice_of
from ..collectives.watching import compare_first
from ..engine.group import COPIED, UNSHARDED, FSDPParamGroup
from ..engine.state import STATE
from ..parameters.replacements import Accept
from ..ranks.rank_facts import all_reduce_now
from ..torch_private.internals import new_dtensor, peek_local, untraced

if TYPE_CHECKING:
    from ..engine.parameter import FSDPParam
    from ..engine.root import Root


_LOOKING_UP, _SENDING_BACK = "looking rows up in", "sending gradients of rows to"


class VocabParallelEmbedding(nn.Embedding):
    """The class of an nn.Embedding after `fsdp2.vocab_parallel_embedding`. A copy that is not sharded yet computes as
    an nn.Embedding.
    """

    runs_without_gather = True

    @untraced
    def forward(self, input: Tensor) -> Tensor:
        """Returns the rows of `input`, ids of any shape. Every rank of the mesh must call it, as often as the others;
        each with as many ids as it has.

        Raises:
            IndexError: on all ranks, if some rank has an id that the table has no row for.
            NotImplementedError, RuntimeError: see `_refuse`.
        """
        state = self.__dict__.get(STATE)
        if state is None:  # while a copy of it is being made
            return super().forward(input)
        output: Tensor = _embed(state.groups[0], input)
        dtype = state.policy.output_dtype
        return output if dtype is None else output.to(dtype)


class Route(NamedTuple):
    """The way of the ids of one forward to the owners of their rows.

    `order`: the places of this rank's ids in ascending order of ids, and so of owners. `rows`: the rows of this rank's
    shard that it sends, one rank's after the other's. `sent`, `received`: how many ids go to each rank, and come from.
    """

    order: Tensor
    rows: Tensor
    sent: list[int]
    received: list[int]


@hides_modes
def _embed(group: FSDPParamGroup, ids: Tensor) -> Tensor:
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{group}: expected ids of dtype torch.int64 or torch.int32, got {ids.dtype}")
    _refuse(group)
    if group.phase is not UNSHARDED:  # else a user has gathered it, and reads it
        group.adopt_replacements(Accept.SHARDED)
    group.root.prefetcher.ran_alone(group)
    for wait in group.root.waits_before_read:
        wait(group)
    (param,) = group.params
    output: Tensor = _Rows.apply(param.sharded, group, param, ids)
    return output


def _find_route(group: FSDPParamGroup, param: FSDPParam, ids: Tensor) -> Route:
    mesh, num_rows = group.mesh, param.shape[0]
    # From here on ids ascend.
    sorted_ids, order = ids.reshape(-1).to(torch.int64).sort(stable=True)
    if mesh.size == 1 and not mesh.replicate_axes:
        return Route(order, sorted_ids, [], [])
    chunk = -(-num_rows // mesh.size)
    edges = torch.arange(mesh.size + 1, device=ids.device) * chunk
    counts = torch.searchsorted(sorted_ids, edges).diff()
    _compare(group, _LOOKING_UP, ids)
    is_wrong = (sorted_ids[:1] < 0).any() | (sorted_ids[-1:] >= num_rows).any()
    if mesh.replicate_group is not None:  # the other replicas raise, too
        is_wrong = is_wrong.to(torch.int64)
        all_reduce_now(is_wrong, mesh.replicate_group, largest=True)
    counts, ranks = counts.masked_fill(is_wrong.bool(), -1), mesh.shard_group
    sent, received = exchange_counts(counts, ranks)
    if -1 in received:
        wrong = [rank for rank, count in enumerate(received) if count < 0]
        raise IndexError(
            f"{param.name}: expected ids from 0 to {num_rows - 1}, got others on rank {wrong[0]} along the axis that "
            "shards" + (", or on a replica of it" if mesh.replicate_axes else "")
        )
    owned = sorted_ids.new_empty(sum(received))
    _all_to_all(owned, sorted_ids, received, sent, ranks)
    return Route(order, owned - mesh.rank * chunk, sent, received)


def _compare(group: FSDPParamGroup, kind: str, like: Tensor) -> None:
    """Returns when all ranks are about to exchange rows of this group, where they compare what they do: the messages of
    an all-to-all have no names. `like`: has the dtype of what follows; ranks have different numbers of rows.

    Raises:
        RuntimeError: they are not; on all ranks.
    """
    comms = group.comms
    for comm in (comms.gathers, comms.replicas):
        if comm is not None and comm.size > 1:
            compare_first(comm, kind, like.new_empty(0))


def exchange_counts(counts: Tensor, process_group: dist.ProcessGroup | None) -> tuple[list[int], list[int]]:
    """Returns how many ids this rank sends to each rank, `counts`, and how many each sends to this one.

    The host waits for both: memory and messages have these sizes.
    """
    received = torch.empty_like(counts)
    _all_to_all(received, counts, None, None, process_group)
    both: list[list[int]] = torch.stack((counts, received)).tolist()
    return both[0], both[1]


def _all_to_all(
    output: Tensor,
    source: Tensor,
    received: list[int] | None,
    sent: list[int] | None,
    process_group: dist.ProcessGroup | None,
) -> None:
    """Sends `sent` rows of `source` to the ranks, one after the other, and gets `received` rows from each; None:
    equally many.
    """
    dist.all_to_all_single(output, source, received, sent, group=process_group)


class _Rows(torch.autograd.Function):
    """Returns the rows of ids, from the shards of all ranks; its backward returns this rank's shard of the gradient."""

    @staticmethod
    def forward(ctx: Any, sharded: Tensor, group: FSDPParamGroup, param: FSDPParam, ids: Tensor) -> Tensor:
        route = _find_route(group, param, ids)
        local = peek_local(sharded)  # behind what writes to it, for which this stream waits, and the host need not
        dtype = local.dtype if param.keeps_dtype else group.settings.policy.compute_dtype(local.dtype)
        rows = local.index_select(0, route.rows).to(dtype)
        if route.sent:
            arrived = rows.new_empty(len(route.order), rows.shape[1])
            _all_to_all(arrived, rows, route.sent, route.received, group.mesh.shard_group)
            rows = arrived
        ctx.save_for_backward(route.order, route.rows)
        ctx.group, ctx.param, ctx.route = group, param, (route.sent, route.received)
        ctx.padding = group.modules[0].padding_idx
        output = torch.empty_like(rows).index_copy_(0, route.order, rows)
        return output.view(*ids.shape, rows.shape[1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    @hides_modes
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (order, rows), (sent, received) = ctx.saved_tensors, ctx.route
        group, param = ctx.group, ctx.param
        mesh, settings = group.mesh, group.settings
        gradients = gradient.reshape(-1, gradient.shape[-1]).index_select(0, order)
        if sent:
            _compare(group, _SENDING_BACK, gradients)
            arrived = gradients.new_empty(len(rows), gradients.shape[1])
            _all_to_all(arrived, gradients, received, sent, mesh.shard_group)
            gradients = arrived
        dtype = settings.policy.reduce_dtype or torch.promote_types(param.sharded.dtype, torch.float32)
        total = torch.zeros(param.local_shape, dtype=dtype, device=gradients.device)
        total.index_add_(0, rows, gradients.to(dtype))
        if ctx.padding is not None and param.bounds[0] <= ctx.padding < param.bounds[1]:
            total[ctx.padding - param.bounds[0]] = 0
        divisor = settings.divide_factor or mesh.num_ranks
        if not mesh.replicate_axes or group.comms.replicas is None:  # with outer_shard, replicas have their own rows
            total.div_(divisor)
        else:
            group.comms.replicas.all_reduce(total, divisor, param.name).wait()
        return new_dtensor(param.tensor_class, total.to(param.delivered_dtype), param.gradient_spec), None, None, None


# ---- what is refused


def vocab_parallel(group: FSDPParamGroup) -> bool:
    """Returns True if the parameter of a group is vocabulary-parallel."""
    return group.settings.vocab_parallel


def refuse_rows(root: Root, what: str, why: str) -> None:
    """Raises NotImplementedError if a table of `root` is vocabulary-parallel, with which `what` does not work."""
    for group in root.groups:
        if vocab_parallel(group):
            raise NotImplementedError(
                f"{what}: {group.params[0].name} is vocabulary-parallel, and {why} Shard that embedding with "
                "fully_shard instead of vocab_parallel_embedding."
            )


def refuse_tied(name: str, table: str, group: FSDPParamGroup) -> None:
    """Raises NotImplementedError if `name`, of another call, is the parameter of `group` that is vocabulary-parallel.
    `table`: its FQN at the embedding.
    """
    if vocab_parallel(group):
        raise NotImplementedError(
            f"{name}: it is the same parameter as {table}, which is vocabulary-parallel, and nobody "
            "gathers all of it. Shard that embedding with fully_shard instead of vocab_parallel_embedding."
        )


def refuse_beside_conditional(groups: Iterable[FSDPParamGroup]) -> None:
    """Raises NotImplementedError if one of `groups`, in a model with conditional modules, is vocabulary-parallel."""
    for group in groups:
        if vocab_parallel(group):
            raise NotImplementedError(
                f"{group.params[0].name}: it is vocabulary-parallel, which all ranks do together, and under the same "
                "root as conditional modules ranks may come to it in different orders. Shard that embedding with "
                "fully_shard instead of vocab_parallel_embedding."
            )


def _refuse(group: FSDPParamGroup) -> None:
    """Raises an error, on all ranks, if a setting is in force that vocabulary-parallel lookups do not follow."""
    settings, choice, why = group.settings, choice_of(group), ""
    if group.phase is COPIED:
        raise RuntimeError(
            f"{group}: its parameters are copies that full_params has made, with which no sharded module runs. Leave "
            "that block first."
        )
    if settings.reduce_hook is not None or settings.comm_hook is not None:
        why = "a hook for reductions"
    elif choice.all_gather is not None or choice.reduce_scatter is not None:
        why = "a collective of your own"
    elif group.root.consensus is not None:
        why = "a conditional module"
    if why:
        raise NotImplementedError(
            f"{group.params[0].name}: it is vocabulary-parallel, which {why} can't change. Shard that embedding with "
            "fully_shard instead of vocab_parallel_embedding."
        )
