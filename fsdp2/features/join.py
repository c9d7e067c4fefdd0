"""Lets ranks run out of batches while others go on: `fsdp2.join`, and torch's own `Join([model])`.

A rank that has left the loop *has joined*. It holds shards of every parameter, so it must take part in all that the
others communicate, and step on its shards. While all ranks are present, they count themselves in one all-reduce before
each forward pass, and nothing else differs. From the first count on that is too small, the ranks that are present tell
those that have joined what they do next: each pass, gather, reduction, and step. A rank that has joined follows in
`JoinHook.main_hook`, and does the same with its shards, and with gradients of zeros.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.join import Join, JoinHook
from torch.optim import Optimizer

from ..engine.policy import check_bool
from ..engine.rank_facts import moves_data, ranks_of
from ..engine.state import require_state
from ..engine.torch_names import has_backend
from .join_consensus import JOIN_CONFIG, ONE_MODEL, JoinConsensus, join_group
from .join_others import block_beside
from .row_embedding import refuse_rows


def join(
    model: nn.Module,
    step: Callable[[], Any] | None = None,
    *,
    optimizer: Optimizer | None = None,
    divide_by_initial_world_size: bool = True,
    enable: bool = True,
    throw_on_early_termination: bool = False,
) -> Joined:
    """Returns a context for a loop over batches of which ranks may have different numbers, or none.

    A rank that leaves the loop waits at the end of the block until all have left theirs. Meanwhile it answers the
    others: it gathers with its shards, reduces zeros, and steps on its shards when they step. So after the block all
    ranks have the parameters, moments and gradients of a training on all batches. torch's own `Join([model])` does the
    same, with the same arguments as keywords.

    While some ranks have joined, `.grad` can't be touched between backward and the optimizer's step, except by
    zero_grad, and parameters can't be written to: ranks that have joined would not do the same. Whatever else belongs
    to a step (clipping, a scaler, a scheduler, averages of weights, collectives) goes into `step`. Ranks that have
    joined follow `optimizer.step()` by themselves if they have stepped that optimizer in the block before, or if it is
    `optimizer`; and optimizers of `set_optimizer_in_backward`. Its settings (lr, ...) must be alike on all ranks.

    Running statistics of BatchNorm are averages over the ranks with batches. A collective of your own in the loop takes
    all ranks, as ever: put it into `step`. So do `full_tensor()` of a sharded parameter, and tools that communicate
    (`check`, `full_params`). Another sharded model, a teacher for example, may run in the loop, and not
    train there. Every rank must enter the block, with the same arguments, and run the same passes for each of its
    batches.

    Costs: one all-reduce of a number for each forward pass, which the host waits for. Once a rank has joined, one more
    before each gather, reduction, pass and step, and all gradients of a group are reduced together.

    Args:
        model: the outermost sharded module. It may replicate, have conditional modules, offload, accumulate.
        step: what all ranks are to do for one step. Call `joined.step()` in the loop, not the function itself. Ranks
            that have joined call it whenever others do.
        optimizer: the one whose `step()` the loop calls, if some rank may have no batch at all.
        divide_by_initial_world_size: True: gradients are divided by the number of ranks, as DDP's default is: those of
            ranks that have joined count as zeros. False: by the number of ranks with a batch. A factor of
            `set_gradient_divide_factor` holds in either case; inside of `accumulate`, the weights do.
        enable: False: nothing is counted or followed.
        throw_on_early_termination: True: all ranks raise as soon as one has run out.

    Returns:
        A `Joined`.

    Raises:
        TypeError: an argument: `step` can't be called, `optimizer` is no optimizer.
        NotImplementedError: groups are on different ranks (expert parallelism); or another model is in such a block.
        RuntimeError: `model` is not the outermost sharded module, or is in such a block. Later, on all ranks: one has
            left the block by an exception; parameters or gradients were changed outside of a step; the settings of an
            optimizer differ between ranks.

    Example:
        ```python
        def step():
            fsdp2.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        with fsdp2.join(model, step) as joined:
            for batch in loader:  # any number of them on each rank
                loss_of(model, batch).backward()
                joined.step()
        ```
    """
    check_bool("divide_by_initial_world_size", divide_by_initial_world_size)
    check_bool("enable", enable)
    check_bool("throw_on_early_termination", throw_on_early_termination)
    options = {
        "step": step,
        "optimizer": optimizer,
        "divide_by_initial_world_size": divide_by_initial_world_size,
    }
    return Joined(model, options, enable, throw_on_early_termination)


class Joined(Join):
    """Is the block of a loop over different numbers of batches, which `join` returns. Enter it once, by `with`."""

    def __init__(self, model: Any, options: dict[str, Any], enable: bool, throws: bool) -> None:
        require_state(model)
        super().__init__([model], enable=enable, throw_on_early_termination=throws, **options)
        self._is_enabled, self._throws, self._own_step = enable, throws, options["step"]

    def __enter__(self) -> Joined:
        return self

    def step(self) -> Any:
        """Calls the function `step` that `join` got, on all ranks: on those that have joined, too.

        Every rank that has a batch must call it.

        Returns:
            What the function returns.

        Raises:
            RuntimeError: `join` got no function.
        """
        if self._own_step is None:
            raise RuntimeError("joined.step: expected fsdp2.join(model, step) to have got a function, it has got none")
        following = self._hook.following
        return self._own_step() if following is None or not self._is_enabled else following.step()

    @property
    def _hook(self) -> FollowHook:
        hook: Any = self._join_hooks[0]
        found: FollowHook = hook
        return found

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        hook = self._hook
        try:
            if kind is not None:
                hook.leave()
            elif self._is_enabled:
                hook.settle()
                is_last = True
                while self._get_num_nonjoined_procs():
                    if self._throws:
                        self._notify_procs_to_terminate()
                    hook.main_hook()
                    is_last = False
                hook.post_hook(is_last)
        finally:
            hook.close()


class FollowHook(JoinHook):
    """Is what a rank does in torch's Join when it has run out. `following`: None on a model that one rank has whole."""

    def __init__(self, model: nn.Module, following: JoinConsensus | None) -> None:
        self.following, self._model = following, weakref.ref(model)

    def main_hook(self) -> None:
        """Follows one phase of the ranks that are present."""
        if self.following is not None:
            self.following.follow_phase()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Ends the block on all ranks."""
        if self.following is not None:
            self.following.end()
        self.close()

    def settle(self) -> None:
        """Tells other ranks that a pass has raised and was left out, if one has."""
        if self.following is not None:
            self.following.settle()

    def leave(self) -> None:
        """Tells the other ranks that this one leaves by an exception, where they listen."""
        if self.following is not None:
            self.following.leave()

    def close(self) -> None:
        """Gives the model its settings of before. It does not communicate."""
        if self.following is not None:
            self.following.close()
        model = self._model()
        if model is not None:
            vars(model).pop(JOIN_CONFIG, None)


# ---- what torch's Join asks of a model


def class_attributes(cls: type) -> dict[str, Any]:
    """Returns what the class of a sharded module has for torch's `Join([model])`, unless the module's own class has it:
    `join_hook`, which takes the keyword arguments of Join, `join_device` and `join_process_group`.
    """
    attributes = {
        "join_hook": make_join_hook,
        "join_device": property(_device_of),
        "join_process_group": property(join_group),
    }
    return {name: value for name, value in attributes.items() if not hasattr(cls, name)}


def _device_of(model: Any) -> torch.device:
    """Returns the device of the numbers by which ranks count who has a batch: the CPU if their process group has it."""
    cpu = torch.device("cpu")
    return cpu if has_backend(join_group(model), cpu) else require_state(model).root.group.mesh.device


def make_join_hook(
    model: Any,
    *,
    step: Callable[[], Any] | None = None,
    optimizer: Optimizer | None = None,
    divide_by_initial_world_size: bool = True,
) -> FollowHook:
    """Returns the hook of `model` for one block; see `join`. Every rank must call it."""
    state = require_state(model)
    root = state.root
    if root.state is not state:
        raise RuntimeError(f"join: expected the root, the outermost sharded module, got {state}")
    if step is not None and not callable(step):
        raise TypeError(f"step: expected a function without arguments or None, got {step!r}")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer: expected a torch.optim.Optimizer or None, got {optimizer!r}")
    refuse_rows(root, "join", "ranks that have run out of batches would have to answer it.")
    mesh = root.group.mesh
    for group in root.groups:
        if group.mesh is not mesh and ranks_of(group.mesh) != ranks_of(mesh):
            raise NotImplementedError(
                f"join: expected all groups on the same ranks, got {group} on {sorted(ranks_of(group.mesh))} and "
                f"{state} on {sorted(ranks_of(mesh))}, which would not know who has run out of batches"
            )
        if group.mesh.shards_at_rest and not group.settings.reshard_after_backward:
            raise NotImplementedError(
                f"join: expected set_reshard_after_backward(True) for {group}, whose replicas share what rests: ranks "
                "that have run out of batches don't know which others have kept it."
            )
    before = root.consensus
    if isinstance(before, JoinConsensus):
        if before.is_alive():
            raise RuntimeError("join: the model is in another block of join. Leave that one first.")
        before.close()
    beside = block_beside(root)
    if beside is not None:
        raise NotImplementedError(
            f"join: {beside.state} is in a block of join that lasts, on the same ranks as {state}; those that have run "
            f"out of batches can't follow both. Expected one sharded model. {ONE_MODEL}"
        )
    if not moves_data(mesh.axis_groups, mesh.device):
        return FollowHook(model, None)
    following = JoinConsensus(model, root, step, optimizer, divide_by_initial_world_size)
    hook = FollowHook(model, following)
    following.hook = weakref.ref(hook)
    return hook
