"""Lists the fixes: what torch does wrong with sharded parameters, and what fsdp2 does instead.

A fix with `attach` changes only the class of sharded parameters and of results computed from them. A fix with `patch`
also changes torch, as "What fsdp2 changes in your process" in README.md lists: for other tensors torch behaves as
before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch

from ..bridge.when_imported import when_imported
from . import dtensor_operations, partial_results
from .addresses import refuse_addresses
from .autograd_inputs import accept_sharded_inputs, find_accumulators_of_unsharded
from .compat import DIVIDES_BY_UNREDUCED
from .copies import copy_gradients
from .counted_collectives import count_collectives_of_shards
from .crossings import average_in_plain_tensors
from .data_attribute import count_local_writes, detach_in_inference, follow_data
from .foreach_operations import operate_on_lists, unscale_on_all_ranks
from .initialisers import initialise_like_plain_tensors
from .mixed_operands import explain_mixed_operands
from .optimizer_steps import follow_optimizer_steps
from .plain_numbers import use_full_tensors_with_plain_numbers
from .random_ops import randomize_like_plain_tensors
from .views import write_through_views


def register_unsharded_in_pipelines() -> None:
    """Adapts torch.distributed.pipelining as soon as a program has imported it."""

    def adapt(stage: ModuleType) -> None:
        from ..bridge import pipelining

        pipelining.adapt(stage)

    when_imported("torch.distributed.pipelining.stage", adapt)


ALL, OLD = "2.11 to 2.15", "2.11 to 2.14"
IS_OLD = torch.__version__ < "2.15"


@dataclass(frozen=True)
class Fix:
    """Describes one fix.

    Args:
        name: the name by which it is switched.
        torch: what torch does.
        instead: what fsdp2 does instead.
        attach: changes the class of sharded parameters. It is called again whenever a fix is switched.
        patch: changes a function of torch, once. The new function checks at each call if the fix is in force.
        releases: the releases of torch in which torch does that.
        situations: in how many of the tests' situations training goes wrong without this fix alone, in torch 2.13. The
            tests have no situation for some fixes.
    """

    name: str
    torch: str
    instead: str
    attach: Callable[[], None] | None = None
    patch: Callable[[], None] | None = None
    releases: str = ALL
    situations: int = 0


FIXES = (
    Fix(
        "full-tensor",
        "assumes that ranks compute the same from `full_tensor()`, or `to_local()` of a replicated tensor: each rank "
        "keeps its shard of its own gradient; sums over ranks, in backward of collectives of shards, are not divided",
        "gradients are averaged over the ranks, like all others",
        average_in_plain_tensors,
        situations=5,
    ),
    Fix(
        "plain-numbers",
        "assumes that a plain number in `loss * p.norm()` is equal on all ranks; backward may fail",
        "`+ - * /` with a plain number that has a graph, or differs between ranks, use `full_tensor()`",
        use_full_tensors_with_plain_numbers,
        situations=3,
    ),
    Fix(
        "data",
        "`p.data = other` changes nothing; writes to `p.data` are not counted in the version of `p`",
        "an assignment takes effect, also of the full tensor; writes to `p.data` count",
        follow_data,
        situations=3,
    ),
    Fix(
        "local-versions",
        "a write to `to_local()` of a state dict's view of a parameter is not counted in its version",
        "it is counted: unsharded parameters are gathered again, and autograd refuses older saved tensors",
        count_local_writes,
        situations=1,
    ),
    Fix(
        "inference-detach",
        "`detach()` in inference mode fails",
        "it is a view",
        detach_in_inference,
        situations=1,
    ),
    Fix(
        "copies",
        "`copy.deepcopy(p.grad)`, pickling and saving it fail where gradients share a storage",
        "each copy has its own memory",
        copy_gradients,
        situations=3,
    ),
    Fix(
        "pipelines",
        "zero-bubble schedules search the sharded parameters for the leaves of the graph, and find none",
        "unsharded parameters are registered during the search",
        patch=register_unsharded_in_pipelines,
    ),
    Fix(
        "inputs",
        "`backward(inputs=[p])` does nothing, nor do `torch.autograd.grad` and hooks on several gradients",
        "gradients are computed; `torch.autograd.grad`, whose gradients could not be reduced, raises",
        find_accumulators_of_unsharded,
        accept_sharded_inputs,
        situations=9,
    ),
    Fix(
        "views",
        "`p[2]`, `p.split(4)`, `p.diagonal()` are copies, and writes to them are lost; `p.view(-1)` fails",
        "writes to them write to `p`, as with plain tensors",
        write_through_views,
        situations=6,
    ),
    Fix(
        "foreach",
        "foreach and fused steps fail where plain tensors are among DTensors, or have no rule; versions don't change",
        "they run on local tensors, and increment versions",
        operate_on_lists,
        situations=2,
    ),
    Fix(
        "scaled-gradients",
        "`GradScaler` tells an infinity to the ranks of the first gradient only: where meshes differ, others step",
        "all ranks that hold a part of any of the gradients learn of it, and skip the step",
        unscale_on_all_ranks,
        situations=1,
    ),
    Fix(
        "truths",
        "`any()` and `all()` count the ranks that found one",
        "the results of the ranks are reduced at once",
        partial_results.reduce_truths if IS_OLD else None,
        releases=OLD,
        situations=1,
    ),
    Fix(
        "sums-of-norms",
        "sums of norms are norms of sums",
        "norms are reduced first",
        partial_results.sum_reduced_norms if IS_OLD else None,
        releases=OLD,
        situations=1,
    ),
    Fix(
        "joined-parts",
        "stacking a norm with other numbers makes Partial norms of all of them, which have no sign",
        "they are reduced first, unless all have the same placement",
        partial_results.join_reduced_results,
        situations=1,
    ),
    Fix(
        "written-parts",
        "a number written in place to a Partial sum is written to each rank's addend",
        "it is written to the reduced sum",
        partial_results.write_reduced_values,
        situations=1,
    ),
    Fix(
        "divisions",
        "a number is divided by each rank's addend of a Partial sum",
        "it is divided by the reduced sum",
        partial_results.divide_by_reduced if DIVIDES_BY_UNREDUCED else None,
        releases="2.11, 2.12",
    ),
    Fix("masks", "`p[mask] = number` fails", "each rank writes to its shard", dtensor_operations.put_by_masks),
    Fix(
        "uneven-writes",
        "writing to a tensor that two mesh axes cut unevenly, or of few rows, fails on some ranks while others wait",
        "each rank writes to its shard",
        dtensor_operations.write_uneven_shards,
        situations=1,
    ),
    Fix(
        "mean-losses",
        "`mse_loss` and similar losses are the mean of the ranks' means",
        "they are the mean over all elements",
        dtensor_operations.average_losses,
        situations=1,
    ),
    Fix(
        "extremes",
        "extremes of a parameter, and their indices, fail on ranks with an empty shard while others wait",
        "they are those of the full tensor",
        dtensor_operations.find_extremes,
        situations=1,
    ),
    Fix(
        "no-dims",
        "reductions over the dims `()`, as in the gradients of extremes, reduce each rank's shard",
        "they are over all dims",
        dtensor_operations.reduce_over_all_dims,
    ),
    Fix(
        "negative-dims",
        "the gradient of `p.select(-1, 0)` is that of another dim",
        "it is that of the last dim",
        dtensor_operations.select_backward if IS_OLD else None,
        releases=OLD,
    ),
    Fix(
        "item",
        "`item()` of a Partial number is this rank's value before the reduction",
        "it raises, and says what to write; bools are reduced",
        dtensor_operations.read_numbers,
        situations=2,
    ),
    Fix(
        "collectives",
        "`torch.distributed`'s collectives on a sharded tensor mix the ranks' shards, or fail",
        "they raise, and say what to write",
        dtensor_operations.refuse_collectives,
        situations=2,
    ),
    Fix(
        "random",
        "random operations on CPU give the shards of all ranks the same values",
        "each rank gets its shard of what a plain tensor would get from that seed",
        randomize_like_plain_tensors,
        situations=5,
    ),
    Fix(
        "initialisers",
        "`eye_` writes the full identity to each shard; `orthogonal_` and `sparse_` fail",
        "all of `torch.nn.init` is exact",
        initialise_like_plain_tensors,
    ),
    Fix(
        "addresses",
        "addresses of storages, `numpy()`, `__dlpack__` are 0, or fail without a hint; so is `data_ptr()`",
        "they raise, and say what to call; `data_ptr()` is that of the shard, and raises where libraries would read it",
        refuse_addresses,
    ),
    Fix(
        "errors",
        "errors about plain tensors among DTensors, and about missing rules, name no parameter",
        "they name it, and say what to write",
        explain_mixed_operands,  # the last, because it wraps the handlers of the others
        situations=3,
    ),
    Fix(
        "optimizer-steps",
        "foreach and fused steps change no version; a closure's loss differs between ranks; Adafactor fails; full "
        "states that an optimizer loads stay full, and the next step fails",
        "steps increment versions; the loss is averaged; a step that changes no model, or can't be taken, raises; each "
        "rank keeps its shard of states",
        patch=follow_optimizer_steps,
        situations=6,
    ),
    Fix(
        "counted-collectives",
        "`CommDebugMode` leaves out the collectives of operations on subclasses of DTensor",
        "it counts those of operations on sharded parameters",
        patch=count_collectives_of_shards,
    ),
)
NAMES = tuple(fix.name for fix in FIXES)
