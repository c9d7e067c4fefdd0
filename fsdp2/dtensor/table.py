"""Lists the fixes: what torch does wrong with sharded parameters, and what fsdp2 does instead.

A fix with `attach` changes only the class of sharded parameters and of results computed from them. A fix with `patch`
also changes torch, as "What is changed of torch" in fsdp2/README.md lists: for other tensors torch behaves as
before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from ..bridge.when_imported import when_imported
from .addresses import refuse_addresses
from .autograd_inputs import accept_sharded_inputs, find_accumulators_of_unsharded
from .copies import copy_gradients
from .counted_collectives import count_collectives_of_shards
from .crossings import average_in_plain_tensors
from .data_attribute import follow_data
from .foreach_operations import operate_on_lists
from .optimizer_steps import follow_optimizer_steps
from .random_ops import randomize_like_plain_tensors
from .reductions import average_losses, count_dims, reduce_full_tensors
from .refusals import explain_refusals
from .sharded_dtensor import reduce_results
from .views import write_through_views
from .writes import write_to_shards


def register_unsharded_in_pipelines() -> None:
    """Adapts torch.distributed.pipelining as soon as a program has imported it."""

    def adapt(stage: ModuleType) -> None:
        from ..bridge import pipelining

        pipelining.adapt(stage)

    when_imported("torch.distributed.pipelining.stage", adapt)


@dataclass(frozen=True)
class Fix:
    """Describes one fix.

    Args:
        name: the name by which it is switched.
        torch: what torch does.
        instead: what fsdp2 does instead.
        attach: changes the class of sharded parameters. It is called again whenever a fix is switched.
        patch: changes a function of torch, once. The new function checks at each call if the fix is in force.
        situations: in how many of the tests' situations training goes wrong without this fix alone, in torch 2.13. The
            tests have no situation for some fixes.
    """

    name: str
    torch: str
    instead: str
    attach: Callable[[], None] | None = None
    patch: Callable[[], None] | None = None
    situations: int = 0


FIXES = (
    Fix(
        "partial-results",
        "leaves norms, sums, `any()` and others unreduced until they are needed, and takes some unreduced values for "
        "reduced ones: sums of norms are norms of sums, truths are counted, numbers are written to each addend",
        "each operation reduces its result at once",
        reduce_results,
        situations=5,
    ),
    Fix(
        "full-tensor",
        "assumes that ranks compute the same from `full_tensor()`, or `to_local()` of a replicated tensor, and that a "
        "plain number in `loss * p.norm()` is equal on all ranks: each rank keeps its shard of its own gradient; sums "
        "over ranks, in backward of collectives of shards, are not divided",
        "gradients are averaged over the ranks, like all others; `+ - * /` with a plain number that has a graph, or "
        "differs between ranks, use `full_tensor()`",
        average_in_plain_tensors,
        situations=7,
    ),
    Fix(
        "data",
        "`p.data = other` changes nothing; writes to `p.data`, and to `to_local()` of a state dict's view, are not "
        "counted in the version of `p`; `detach()` in inference mode fails",
        "an assignment takes effect, also of the full tensor; writes count: unsharded parameters are gathered again, "
        "and autograd refuses older saved tensors; `detach()` is a view",
        follow_data,
        situations=5,
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
        "foreach and fused steps fail where plain tensors are among DTensors, or have no rule; versions don't change; "
        "`GradScaler` tells an infinity to the ranks of the first gradient only: where meshes differ, others step",
        "they run on local tensors, and increment versions; all ranks that hold a part of any of the gradients learn "
        "of an infinity, and skip the step",
        operate_on_lists,
        situations=3,
    ),
    Fix(
        "writes",
        "`p[mask] = number` and `p[indices] = number` fail, `eye_` writes the full identity to each shard, "
        "`orthogonal_` fails; writing to a tensor that two mesh axes cut unevenly, or of few rows, fails on some ranks "
        "while others wait",
        "each rank writes to its shard; all of `torch.nn.init` is exact",
        write_to_shards,
        situations=1,
    ),
    Fix(
        "mean-losses",
        "`mse_loss` and similar losses are the mean of the ranks' means",
        "they are the mean over all elements",
        average_losses,
        situations=1,
    ),
    Fix(
        "empty-shards",
        "extremes of a parameter, and their indices, fail on ranks with an empty shard while others wait; so does "
        "`item()` of a parameter of one element",
        "they are those of the full tensor",
        reduce_full_tensors,
        situations=2,
    ),
    Fix(
        "dims",
        "reductions over the dims `()`, as in the gradients of extremes, reduce each rank's shard; before 2.15 the "
        "gradient of `p.select(-1, 0)` is that of another dim",
        "they are over all dims; it is that of the last dim",
        count_dims,
    ),
    Fix(
        "random",
        "random operations on CPU give the shards of all ranks the same values",
        "each rank gets its shard of what a plain tensor would get from that seed",
        randomize_like_plain_tensors,
        situations=5,
    ),
    Fix(
        "addresses",
        "addresses of storages, `numpy()`, `__dlpack__` are 0, or fail without a hint; so is `data_ptr()`",
        "they raise, and say what to call; `data_ptr()` is that of the shard, and raises where libraries would read it",
        refuse_addresses,
    ),
    Fix(
        "errors",
        "errors about plain tensors among DTensors, and about missing rules, name no parameter; collectives of "
        "`torch.distributed` on a sharded tensor mix the ranks' shards, or fail",
        "they name it, and say what to write; collectives raise",
        explain_refusals,
        situations=5,
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
