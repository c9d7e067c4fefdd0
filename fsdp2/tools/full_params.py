"""Makes unsharded parameters available outside their module's own forward: `with full_params(...)`.

Without options a block does to its groups what a forward does: their unsharded parameters are registered, and their
gradients are reduced as usual. With any option it registers copies of the stored parameters, which get no gradients:
see unsharded_copies.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, overload

import torch
from torch import Tensor, nn

from ..shards.find import refuse_written
from ..shards.protocol import ShardGroup, ShardParam
from ..shards.tensors import check_bool, hidden, untraced
from .given_params import GivenParams
from .unsharded_copies import UnshardedCopies


@overload
def full_params(
    module_or_params: nn.Module,
    *,
    recurse: bool = True,
    writeback: bool = False,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    dtype: torch.dtype | None = None,
    with_grads: bool = False,
) -> AbstractContextManager[dict[str, nn.Parameter]]: ...


@overload
def full_params(
    module_or_params: Tensor,
    *,
    writeback: bool = False,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    dtype: torch.dtype | None = None,
    with_grads: bool = False,
) -> AbstractContextManager[nn.Parameter]: ...


@overload
def full_params(
    module_or_params: Iterable[Tensor],
    *,
    writeback: bool = False,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    dtype: torch.dtype | None = None,
    with_grads: bool = False,
) -> AbstractContextManager[list[nn.Parameter]]: ...


@untraced
def full_params(
    module_or_params: nn.Module | Tensor | Iterable[Tensor],
    *,
    recurse: bool = True,
    writeback: bool = False,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    dtype: torch.dtype | None = None,
    with_grads: bool = False,
) -> AbstractContextManager[Any]:
    """Returns a context that yields unsharded parameters, and registers them in their modules.

    Every rank must enter and leave it alike. When it ends, also by an exception, the sharded parameters are registered
    again.

    Without options it yields the unsharded parameters that forwards compute with, in the policy's `param_dtype`.
    Results computed from them are differentiable, inside a forward or outside of any. Their gradients are reduced, or
    accumulated, with those of the modules' own forwards, in a backward inside the block or after it, for which they are
    gathered again. They have no data after the block: `clone` what you keep. Whole groups are gathered and registered.
    A function that activation checkpointing runs again must have the block inside it.

    With any option except `recurse` it yields copies in the dtype in which the parameters are stored, which get no
    gradients. They stay valid after the block. Inside it, modules can't compute with sharded parameters of these
    groups.

    Args:
        module_or_params: for a module, the context yields {FQN: parameter} of all its parameters, and leaves those that
            are not sharded as they are; for a sharded parameter the unsharded one; for an iterable of them a list.
        recurse: include the parameters of sharded modules inside the module.
        writeback: at the end, write the values of the copies into the sharded parameters. They must have been changed
            (in place, by assignment or by `load_state_dict`) on all ranks alike, and under all names of a tied one. An
            optimizer's state stays; its steps belong before the block or after it. After an exception nothing is
            written.
        rank0_only: only the first rank of each group's mesh gets data; on others the copies are on meta.
        offload_to_cpu: copies are on the CPU. Only one group at a time is unsharded on the device.
        dtype: the dtype of copies of floating-point parameters.
        with_grads: copies have whole gradients, copied, too, where the sharded parameters have some. They are to be
            read: a change raises, and `writeback` is refused. All ranks must have gradients of the same parameters.

    Raises:
        TypeError, ValueError: a wrong argument; no parameter that was passed is sharded; or, at the end, copies that
            differ between ranks, or between the names of one parameter, or whose shape or dtype has changed. The latter
            are raised on every rank, before any parameter is written.
        NotImplementedError: copies of parameters with `fsdp_pre_all_gather`; `writeback` with `rank0_only`; or
            `with_grads` under tensor parallelism.
        RuntimeError: without `writeback`, a parameter was written to; or, for copies, a backward, a forward of the same
            groups, or another block runs. Without options, writes through `.data` are detected in a group's 1st, 2nd,
            4th, ... block, and in each block at the debug level.

    Example:
        ```python
        with fsdp2.full_params(model) as weights:  # differentiable: a penalty, a forward of a module inside
            penalty = weights["head.weight"].square().mean()
        with fsdp2.full_params(model, writeback=True), torch.no_grad():  # between steps
            model.embed.weight[0] = 0
        with fsdp2.full_params(model, rank0_only=True, offload_to_cpu=True) as weights:  # copies, to save
            if dist.get_rank() == 0:
                torch.save(weights, "weights.pt")
        ```
    """
    _check(recurse, writeback, rank0_only, offload_to_cpu, dtype, with_grads)
    given = GivenParams.of(module_or_params, recurse)
    if writeback or rank0_only or offload_to_cpu or dtype is not None or with_grads:
        return _copied(given, writeback, rank0_only, offload_to_cpu, dtype, with_grads)
    return _in_use(given)


def _check(recurse: Any, writeback: Any, rank0_only: Any, offload_to_cpu: Any, dtype: Any, with_grads: Any) -> None:
    flags = {"recurse": recurse, "writeback": writeback, "rank0_only": rank0_only, "offload_to_cpu": offload_to_cpu}
    flags["with_grads"] = with_grads
    for name, value in flags.items():
        check_bool(name, value)
    if not isinstance(dtype, (torch.dtype, type(None))):
        raise TypeError(f"dtype: expected a torch.dtype or None, got {dtype!r}")
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype: expected a floating-point dtype, got {dtype}")
    if writeback and rank0_only:
        raise NotImplementedError(
            "writeback with rank0_only is not supported. Leave rank0_only out, and change the parameters on every rank "
            "alike: broadcast values that only one rank has."
        )
    if writeback and with_grads:
        raise ValueError(
            "with_grads: expected False with writeback, got True: gradients are not written back. Scale or clip p.grad "
            "of the sharded parameters."
        )
    if writeback and dtype is not None:
        raise ValueError(f"dtype: expected None with writeback, which would round the stored values, got {dtype}")


# ---- without options: the unsharded parameters themselves


@contextmanager
def _in_use(given: GivenParams) -> Iterator[Any]:
    """Context: registers the unsharded parameters."""
    groups = list(given.by_group())
    use = groups[0].unsharded
    if use is None or any(group.unsharded is None for group in groups):
        raise NotImplementedError(
            "full_params without options registers parameters that get gradients, which fsdp2 reduces: torch's FSDP2 "
            "does not for parameters that are used outside of their module. Pass an option for copies without "
            "gradients: writeback=True to change the parameters, offload_to_cpu=True, rank0_only=True or dtype= to "
            "read them; or shard the model by fsdp2.fully_shard."
        )
    with use(groups) as unsharded_of:
        yield given.yielded(unsharded_of)


# ---- with options: copies


@contextmanager
def _copied(
    given: GivenParams,
    writeback: bool,
    rank0_only: bool,
    offload_to_cpu: bool,
    dtype: torch.dtype | None,
    with_grads: bool,
) -> Iterator[Any]:
    """Context: registers copies, and writes them back at the end if `writeback` is True."""
    wanted = given.by_group()
    for group, params in wanted.items():
        _check_can_copy(group, params)
    copied = [UnshardedCopies(group, params) for group, params in wanted.items()]
    copies_of: dict[ShardParam, Tensor] = {}
    try:
        with hidden():
            for group, copies in zip(wanted, copied, strict=True):
                device = torch.device("cpu") if offload_to_cpu else group.ranks.device
                has_data = group.ranks.is_first or not rank0_only
                copies_of.update(copies.register(dtype, device, has_data, with_grads))
        yield given.yielded(copies_of.__getitem__)
    finally:
        for copies in copied:
            copies.unregister()
    with hidden():
        if not writeback:
            refuse_written(name for copies in copied for name in copies.written())
            return
        for copies in copied:
            copies.find_changes()
        for copies in copied:
            copies.write_back()


def _check_can_copy(group: ShardGroup, params: Iterable[ShardParam]) -> None:
    if group.in_use == "backward":
        raise RuntimeError(f"{group}: full_params can't copy parameters during a backward pass")
    if group.in_use is not None:
        raise RuntimeError(
            f"{group}: full_params can't copy parameters while a forward, or another full_params, uses the same group. "
            "Without options it can be used there."
        )
    for param in params:
        if param.gathers_itself:
            raise NotImplementedError(
                f"{param.name} has fsdp_pre_all_gather: full_params can't copy its stored form. Use it without options."
            )
