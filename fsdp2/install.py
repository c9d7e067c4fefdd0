"""Adds the features and observers of all folders to the engine. Each is named here with the module that defines it."""

from __future__ import annotations

from .bridge import pipelining, torch_interface
from .calls import transforms
from .checks import comm_watcher, entry_points, named_comm, observers, tools_when_needed
from .checks.plan import check_plan
from .dtensor import fixes, optimizer_steps
from .engine.events import extend
from .features import (
    blocks,
    conditional,
    even_batches,
    large_submodules,
    module_repr,
    optimizer_in_backward,
    running_stats,
)
from .parameters import parameter_methods, subclasses
from .torch_private.bridge import keep_out_of_graphs


def install() -> None:
    """Extends the engine. `import fsdp2` calls it, once."""
    extend(
        comm_watcher=comm_watcher.Watched(),
        plan=(check_plan, subclasses.plan_packed_values, large_submodules.plan_large_submodules),
        class_attributes=(module_repr.class_attributes, even_batches.class_attributes),
        after_sharding=(
            torch_interface.register_state,
            entry_points.leave_fast_path,
            large_submodules.gather_when_called,
            parameter_methods.hook_state_dicts,
            lambda state: keep_out_of_graphs(),
            lambda state: transforms.withdraw_where_disabled(),
            lambda state: pipelining.adapt_schedules(),
        ),
        features=(optimizer_in_backward.step_in_backward, conditional.join_consensus),
        in_profiler=(tools_when_needed.ProfilerRanges,),
        observers=(named_comm.Goodbyes, lambda root: tools_when_needed.Summary()),
    )
    fixes.install()
    optimizer_steps.before_step.append(blocks.refuse_step)
    observers.install()
    extend(observers=(running_stats.make_running_stats,))  # behind all checks
