"""The fixes: what torch's DTensor, and torch beside it, does wrong with sharded parameters, and what is done instead.

A fix with `attach` changes the class of sharded parameters, and of what is computed of them, only. One with `patch`
wraps a function of torch, which then looks for sharded parameters among its arguments; without any it does what it did.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from .. import torch_compat
from ..bridge.pipelining import register_full_in_pipelines
from .compat import DIVIDES_BY_PARTS, use_class
from ..ext.once import once
from .sharded_dtensor import ShardedDTensor, forget_replacements
from . import dtensor_operations, partial_results, switches
from .addresses import refuse_addresses
from .autograd_inputs import accept_sharded_inputs
from .copies import copy_gradients
from .data_attribute import count_local_writes, detach_in_inference, follow_data
from .ddp_around import refuse_ddp_around
from .draws import draw_like_plain_tensors
from .foreach_operations import operate_on_lists
from .full_tensor import average_in_full_tensor
from .initialisers import initialise_like_plain_tensors
from .mixed_norms import refuse_mixed_norms
from .mixed_operands import explain_mixed_operands
from .optimizer_states import cut_loaded_states
from .optimizer_steps import follow_optimizer_steps
from .parallelize_after import refuse_parallelize_after
from .parts import write_through_parts
from .plain_operands import meet_plain_numbers
from .reparametrize_after import refuse_reparametrization_after

ALL, OLD = "2.11 to 2.15", "2.11 to 2.14"
IS_OLD = torch.__version__ < "2.15"


@dataclass(frozen=True)
class Fix:
    """One line of the table.

    Args:
        name: what it is called where it is switched.
        torch: what torch does.
        instead: what is done instead.
        attach: has the class of sharded parameters do that. It is called anew whenever a fix is switched.
        patch: has a function of torch do that, for good; the function asks whether the fix is in force.
        releases: of torch, in which torch does that.
        situations: how many of the situations that the tests know end wrong without the fix alone, in torch 2.13; some
            are not among them.
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
        "takes what ranks compute of `p.full_tensor()` for the same: each rank keeps its part of its own gradient",
        "gradients are averaged over the ranks, as all others",
        average_in_full_tensor,
        situations=2,
    ),
    Fix(
        "plain-numbers",
        "takes a plain number beside a DTensor (`loss * p.norm()`) for the same on all ranks; backward fails, or not",
        "`+ - * /` with a plain number that has a graph, or differs between ranks, are those of `full_tensor()`",
        meet_plain_numbers,
        situations=3,
    ),
    Fix(
        "data",
        "`p.data = other` changes nothing; `p.data` is no DTensor that counts what is written to it",
        "an assignment is seen, also of the whole tensor; what is written to `p.data` counts",
        follow_data,
        situations=3,
    ),
    Fix(
        "local-versions",
        "what is written to `to_local()` of a state dict's view of a parameter does not count as a write",
        "it counts, so that kept copies are not used, and autograd refuses what it has saved",
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
        "copies have memory of their own",
        copy_gradients,
        situations=4,
    ),
    Fix(
        "pipelines",
        "zero-bubble schedules look for the leaves of the graph among sharded parameters, and find none",
        "unsharded ones are registered meanwhile",
        patch=register_full_in_pipelines,
    ),
    Fix(
        "inputs",
        "`backward(inputs=[p])` does nothing; `torch.autograd.grad` and hooks on several gradients neither",
        "the gradients come; `torch.autograd.grad`, which has none to reduce, raises",
        patch=accept_sharded_inputs,
        situations=6,
    ),
    Fix(
        "views",
        "`p[2]`, `p.split(4)`, `p.diagonal()` are copies, what is written to them is lost; `p.view(-1)` fails",
        "they are views to whoever writes to them",
        write_through_parts,
        situations=5,
    ),
    Fix(
        "foreach",
        "foreach and fused steps fail where plain tensors are among DTensors, or have no rule; no version counts them",
        "they run on local tensors, and count",
        operate_on_lists,
        situations=2,
    ),
    Fix(
        "truths",
        "`any()` and `all()` count the ranks that found one",
        "they are whole at once",
        partial_results.find_whole_truths if IS_OLD else None,
        releases=OLD,
        situations=1,
    ),
    Fix(
        "sums-of-norms",
        "sums of norms are norms of sums",
        "norms are whole first",
        partial_results.sum_whole_norms if IS_OLD else None,
        releases=OLD,
        situations=1,
    ),
    Fix(
        "joined-parts",
        "stacking a norm with others makes parts of norms of all, which have no sign",
        "what is stacked is whole first, unless all are alike",
        partial_results.join_whole_parts,
        situations=1,
    ),
    Fix(
        "written-parts",
        "a number written in place to a sum of which ranks hold parts is written to each part",
        "it is written to the whole",
        partial_results.write_whole_parts,
        situations=1,
    ),
    Fix(
        "divisions",
        "a number is divided by each rank's part of a sum",
        "it is divided by the whole",
        partial_results.divide_by_whole if DIVIDES_BY_PARTS else None,
        releases="2.11, 2.12",
    ),
    Fix("masks", "`p[mask] = number` fails", "each rank writes to its rows", dtensor_operations.put_by_masks),
    Fix(
        "uneven-writes",
        "writing to what two mesh axes cut unevenly, or to few rows, fails on some ranks while others wait",
        "each rank writes to its rows",
        dtensor_operations.write_uneven_shards,
        situations=1,
    ),
    Fix(
        "mean-losses",
        "`mse_loss` and its kin are the mean of the ranks' means",
        "they are the mean over all elements",
        dtensor_operations.average_losses,
        situations=1,
    ),
    Fix(
        "extremes",
        "extremes and their places, of parameters of which some rank holds nothing, fail there while others wait",
        "they are those of the whole",
        dtensor_operations.find_extremes,
        situations=1,
    ),
    Fix(
        "no-dims",
        "reductions over the dims `()`, as gradients of extremes have them, reduce each rank's part",
        "they are over all dims",
        dtensor_operations.reduce_over_all_dims,
    ),
    Fix(
        "negative-dims",
        "the gradient of `p.select(-1, 0)` is that of another dim",
        "it is that of the last",
        dtensor_operations.select_backward if IS_OLD else None,
        releases=OLD,
    ),
    Fix(
        "item",
        "`item()` of what each rank holds a part of is this rank's part",
        "it raises, and says what to write; truths are those of all ranks",
        dtensor_operations.read_numbers,
        situations=2,
    ),
    Fix(
        "collectives",
        "`torch.distributed`'s collectives on a sharded tensor mix the ranks' parts, or fail",
        "they raise, and say what to write",
        dtensor_operations.refuse_collectives,
        situations=2,
    ),
    Fix(
        "random",
        "random values drawn on CPU give each rank's part the same ones",
        "each rank gets its part of what a plain tensor would get from that seed",
        draw_like_plain_tensors,
        situations=5,
    ),
    Fix(
        "initialisers",
        "`eye_` writes the whole to each part; `orthogonal_` and `sparse_` fail",
        "all of `torch.nn.init` is exact",
        initialise_like_plain_tensors,
    ),
    Fix(
        "addresses",
        "`data_ptr()`, `numpy()`, `__dlpack__` hand out an address of 0, or fail without a hint",
        "they raise, and say what to call",
        refuse_addresses,
    ),
    Fix(
        "errors",
        "errors about plain tensors beside DTensors, and missing rules, name no parameter",
        "they name it, and say what to write",
        explain_mixed_operands,  # behind all that handle operations
        situations=2,
    ),
    Fix(
        "optimizer-steps",
        "foreach and fused steps count nowhere; a closure's loss differs between ranks; Adafactor fails",
        "steps count; the loss is averaged; what can't change the model, or can't be stepped, raises",
        patch=follow_optimizer_steps,
        situations=6,
    ),
    Fix(
        "optimizer-states",
        "whole states that an optimizer loads stay whole, and the next step fails",
        "each rank keeps its part",
        patch=cut_loaded_states,
    ),
    Fix(
        "ddp-around",
        "DDP around a sharded model fails with an error about views",
        "it raises, and says what to do",
        patch=refuse_ddp_around,
        situations=1,
    ),
    Fix(
        "parallelize-after",
        "`parallelize_module` after fully_shard fails with an error about meshes",
        "it raises, and says what to do",
        patch=refuse_parallelize_after,
    ),
    Fix(
        "reparametrize-after",
        "pruning and parametrizations after fully_shard fail, or train something else",
        "they raise, and say what to do",
        patch=refuse_reparametrization_after,
    ),
    Fix(
        "mixed-norms",
        "a norm over several meshes fails with an error about stacking",
        "it raises, and names ours",
        patch=refuse_mixed_norms,
    ),
)
NAMES = tuple(fix.name for fix in FIXES)


@once
def correct_torch() -> None:
    """Puts the fixes in force that the environment does not leave out. The first fully_shard calls it."""
    torch_compat.keep_out_of_graphs()
    switches.read_environment(NAMES)
    _attach()
    for fix in FIXES:
        if fix.patch is not None:
            fix.patch()


def _attach() -> None:
    forget_replacements()
    for fix in FIXES:
        if fix.attach is not None and switches.is_on(fix.name):
            fix.attach()
    use_class(ShardedDTensor if any(switches.is_on(fix.name) for fix in FIXES if fix.attach) else DTensor)


def dtensor_fixes(enabled: bool, *names: str) -> None:
    """Switches fixes for sharded parameters on or off, from now on, in this process: call it on every rank alike.

    They are all on unless the environment variable FSDP2_DTENSOR_FIXES says otherwise: `off`, or names to leave out
    (`-views,-random`). `python -m fsdp2 fixes` prints what each does.

    Args:
        enabled: True: do what plain tensors do. False: do what torch's DTensor does.
        names: of the fixes; none: all. With all off, modules that are sharded from then on have plain DTensors.

    Raises:
        TypeError: `enabled` is not a bool.
        ValueError: there is no fix of that name.
    """
    if not isinstance(enabled, bool):
        raise TypeError(f"enabled: expected a bool, got {enabled!r}")
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise ValueError(f"names: expected some of {', '.join(NAMES)}; got {', '.join(map(str, unknown))}")
    correct_torch()
    switches.switch(names or NAMES, enabled)
    _attach()


def describe_fixes() -> str:
    """Returns the table as Markdown: a line for each fix, with what torch does, what is done instead, the releases of
    torch in which it does that, whether the fix is in force with this torch and this environment, and how many of the
    tests' situations end wrong without it.
    """
    switches.read_environment(NAMES)
    lines = ["| fix | in force | torch | does | instead | situations |", "|---|---|---|---|---|---|"]
    for fix in FIXES:
        applies = fix.attach is not None or fix.patch is not None
        state = "yes" if applies and switches.is_on(fix.name) else "off" if applies else "not needed"
        lines.append(f"| {fix.name} | {state} | {fix.releases} | {fix.torch} | {fix.instead} | {fix.situations} |")
    return "\n".join(lines)


use_class(ShardedDTensor)
