"""Has the methods of FSDPModule on groups that are not part of the core: how they communicate, and what they keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import collectives, streams
from .module import FSDPModule, check_bool, chosen_groups, set_groups
from .state import groups_of, states_of

__all__ = ["GroupMethods"]


class GroupMethods:
    """Has the methods of FSDPModule that choose how groups communicate."""

    def set_unshard_in_backward(self, unshard_in_backward: bool, *, recurse: bool = False) -> None:
        """Chooses whether backward gathers the parameters as soon as it reaches the module.

        While it is False, they are gathered only if backward reads one of them. That saves an all-gather for a module
        whose backward reads no weight, such as an embedding. It has no effect where a rank holds whole parameters.
        Every rank must call it.

        Args:
            unshard_in_backward: True, the default, gathers them.
            recurse: True also sets it for the sharded modules inside this one. The default is False, as in torch.
        """
        check_bool("unshard_in_backward", unshard_in_backward)
        set_groups(self, recurse, unshard_in_backward=unshard_in_backward)

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Chooses which modules are gathered ahead when the forward of this module begins.

        The list replaces the order that the last pass has recorded, for this module only, and stays in force.
        All-gathers begin in the order of the list. Modules under another root stay unsharded until that root runs.
        Where ranks hold whole parameters there is nothing to gather. Every rank must call it, with the same modules.

        Args:
            modules: sharded modules. An empty list gathers nothing ahead.

        Raises:
            ValueError: an element is not a sharded module.

        Example:
            `first.set_modules_to_forward_prefetch([second, third])` gathers two blocks ahead.
        """
        set_groups(self, False, forward_prefetch=groups_of_all("modules", modules))

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Chooses which modules are gathered ahead when backward reaches this module.

        The list replaces the reverse of the order of the forwards, for this module only, and stays in force. For
        modules under another root, and where ranks hold whole parameters, see `set_modules_to_forward_prefetch`. Every
        rank must call it, with the same modules.

        Args:
            modules: sharded modules, in the order in which their all-gathers begin. An empty list gathers nothing
                ahead.

        Raises:
            ValueError: an element is not a sharded module.
        """
        set_groups(self, False, backward_prefetch=groups_of_all("modules", modules))

    def set_reduce_scatter_unused_params(self, enable: bool, *, recurse: bool = True) -> None:
        """Chooses whether a parameter without a gradient on this rank takes part in reductions, with zeros.

        Use it where ranks use different parameters of one group, so that another rank may have a gradient of it.
        Gradients are then reduced when backward leaves the module, not before. A parameter that no rank uses gets a
        gradient of zeros instead of None, also on one rank. For whole modules that only some ranks run, use
        `fully_shard(module, conditional=True)`. Every rank must call it.

        Args:
            enable: False is the default.
            recurse: True, the default, also sets it for the sharded modules inside this one.
        """
        check_bool("enable", enable)
        for group in set_groups(self, recurse, reduce_unused=enable):
            group.needs_no_input_hooks = False

    def set_gradient_divide_factor(self, factor: float, *, recurse: bool = False) -> None:
        """Divides the sum of all ranks' gradients by `factor`, in place of the number of ranks.

        Call it on the root with `recurse=True`: without, it reaches the groups of this module only, not those of its
        blocks. All groups of a model on one mesh must divide by the same number, else the next optimizer step raises a
        RuntimeError, and `check` reports it. Groups on another mesh (experts) may divide by another number. Every rank
        must call it.

        Args:
            factor: a positive number. 1.0 sums gradients.
            recurse: True also sets it for the sharded modules inside this one. The default is False, as in torch.

        Raises:
            ValueError: not a positive number.

        Example:
            `model.set_gradient_divide_factor(1.0, recurse=True)` for a loss that is divided by the tokens of all ranks.
        """
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not factor > 0:
            raise ValueError(f"factor: expected a positive number, got {factor!r}")
        set_groups(self, recurse, divide_factor=float(factor))

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Bounds how many reductions of gradients may be in flight while the next one is packed.

        Each reduction in flight holds its input, a bucket of unsharded gradients. The default, 1, costs the least
        memory. With 2 or more, compute waits less for a slow network; each step up costs the gradients of about one
        more group. Small reductions do not count one by one: up to a quarter of a typical group's gradients may be in
        flight in any case. The largest number that was set below the root holds, from the next forward on. It has no
        effect on one rank.

        Args:
            max_input_buffers: at least 1.
            recurse: True, the default, also sets it for the sharded modules inside this one.

        Raises:
            TypeError: not an int.
            ValueError: less than 1.
        """
        if not isinstance(max_input_buffers, int) or isinstance(max_input_buffers, bool):
            raise TypeError(f"max_input_buffers: expected an int, got {max_input_buffers!r}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers: expected at least 1, got {max_input_buffers}")
        set_groups(self, recurse, max_reductions=max_input_buffers)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Calls `set_gradient_divide_factor`, whose old name this is, for the groups of this module.

        Args:
            factor: a positive number.
        """
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool, *, recurse: bool = False) -> None:
        """Chooses whether gradients are summed by the backend and divided afterwards, also where it could average by
        itself.

        The result is the same up to rounding. It is for backends, or algorithms of NCCL, that offer sums only. gloo and
        one rank never let the backend average, so it has no effect there. Every rank must call it.

        Args:
            enable: True sums. False, the default, lets the backend average where it can.
            recurse: True also sets it for the sharded modules inside this one. The default is False, as in torch.
        """
        check_bool("enable", enable)
        for group in chosen_groups(self, recurse):
            collectives.choose(group, force_sum=enable)

    def set_all_reduce_hook(
        self, hook: Callable[[Tensor], None] | None, *, stream: Any = None, recurse: bool = False
    ) -> None:
        """Calls `hook(reduced)` with each flat tensor of reduced gradients of this rank, before they become `.grad`.

        The tensor has one dimension and the reduce dtype; it holds the shards of one bucket. The hook may change it in
        place, for example to reduce over further ranks. On a mesh that replicates it is called after the all-reduce. On
        one rank it is called, too, with the gradients of that rank. If only modules without parameters have a hook,
        which is never called, the next optimizer step raises a RuntimeError. Every rank must call it.

        Args:
            hook: a function of one tensor. None removes it.
            stream: the torch.Stream on which the hook runs. The hook must not enter it again: torch 2.11 keeps one
                context in each. None: the stream that computes. Only on a mesh without replicas.
            recurse: True also sets it for the sharded modules inside this one. The default is False, as in torch.

        Raises:
            TypeError: `hook` is neither a function nor None.
            ValueError: a stream on a mesh that replicates, or on a mesh of CPUs, which have no streams.

        Example:
            `model.set_all_reduce_hook(lambda reduced: reduced.mul_(0.5), recurse=True)`
        """
        if hook is not None and not callable(hook):
            raise TypeError(f"hook: expected a function or None, got {hook!r}")
        groups = chosen_groups(self, recurse)
        for group in groups if stream is not None else ():
            if group.comms.replicas is not None:
                raise ValueError("stream: expected None on a mesh that replicates, got a stream")
            if not streams.exist_on(group.mesh.device):
                raise ValueError(f"stream: expected None on {group.mesh.mesh}, which has no streams: leave it out")
        run = hook if hook is None or stream is None else _on_stream(hook, stream)
        for group in groups:
            group.set(reduce_hook=run)

    def set_custom_all_gather(self, all_gather: Any) -> None:
        """Gathers the groups of this module by an object of yours, in one flat call for each group.

        The object has two methods. `allocate(size, *, dtype, device)` returns the output, a flat tensor; the input is
        this rank's part of it. `__call__(output_tensor, input_tensor, group, async_op)` fills the output, and returns a
        Work to wait for, or None when it is done. Both tensors are bytes (uint8), whatever the dtypes of the
        parameters. `reshard_after_forward=k` gathers in backward without it. On one rank it is never called. If only
        modules without parameters were given one, the next optimizer step raises a RuntimeError. Every rank must call
        it.

        Args:
            all_gather: such an object. None: the usual all-gather.

        Raises:
            TypeError: it can't be called, or has no `allocate`.
            ValueError: there are several ranks, and all hold whole parameters, so that it would never be called.
        """
        self._choose_collective("all_gather", all_gather, "Nothing is gathered")

    def set_custom_reduce_scatter(self, reduce_scatter: Any) -> None:
        """Reduces the gradients of this module's groups by an object of yours, in one flat call for each bucket.

        The object has two methods. `allocate(size, *, dtype, device)` returns a flat tensor in the reduce dtype; it is
        called for the input and for the output. `__call__(output_tensor, input_tensor, group, op, async_op)` reduces,
        and returns a Work to wait for, or None when it is done. On one rank, and for modules without parameters, see
        `set_custom_all_gather`. Every rank must call it.

        Args:
            reduce_scatter: such an object. None: the usual reduce-scatter.

        Raises:
            TypeError: it can't be called, or has no `allocate`.
            ValueError: the policy has a `wire_dtype` or a `gradient_codec`; or several ranks all hold whole
                parameters, and scatter nothing.
        """
        for state in states_of(self):
            chosen = {"wire_dtype, in": state.policy.wire_dtype, "gradient_codec, by": state.policy.gradient_codec}
            for argument, value in chosen.items() if reduce_scatter is not None else ():
                if value is not None:
                    raise ValueError(
                        f"reduce_scatter: expected None where the policy has a {argument} which gradients are "
                        f"exchanged and not reduced, got {reduce_scatter!r}"
                    )
        why = "Replicas all-reduce their gradients; what they have summed can be changed by set_all_reduce_hook(hook)"
        self._choose_collective("reduce_scatter", reduce_scatter, why)

    def _choose_collective(self, kind: str, collective: Any, why: str) -> None:
        groups = groups_of(self)
        if collective is not None:
            if not callable(collective) or not callable(getattr(collective, "allocate", None)):
                raise TypeError(f"{kind}: expected a callable with a method `allocate`, or None, got {collective!r}")
            meshes = [group.mesh for group in groups]
            if all(mesh.size == 1 for mesh in meshes) and any(mesh.num_ranks > 1 for mesh in meshes):
                raise ValueError(
                    f"{kind}: expected None on {meshes[0].mesh}, all ranks of which hold whole parameters: it would "
                    f"never be called. {why}. Leave set_custom_{kind} out."
                )
        for group in groups:
            collectives.choose(group, **{kind: collective})

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Chooses whether gradients are reduced on a process group of their own.

        A backend that runs one collective at a time per process group, such as NCCL, can then gather and reduce at the
        same time. It makes new process groups. So every rank that shares the shards must call it; if
        `init_process_group` was given a `device_id`, NCCL splits the group of all ranks, and every rank of the program
        must. It has no effect where ranks hold whole parameters.

        Without a call, gradients are reduced on a group of their own on devices whose shards are spread over more than
        8 ranks, unless there was a `device_id` and the mesh does not hold all ranks of the program.

        Args:
            enable: True reduces on a group of its own. False: on that of the mesh.
            recurse: True, the default, also sets it for the sharded modules inside this one.
        """
        check_bool("enable", enable)
        for group in chosen_groups(self, recurse):
            collectives.choose(group, separate=enable)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Accepts False, which is what happens anyway. True is not supported.

        Args:
            enable: False.

        Raises:
            NotImplementedError: `enable` is True.
        """
        check_bool("enable", enable)
        if enable:
            raise NotImplementedError(
                "set_allocate_memory_from_process_group_for_comm is not supported yet. Leave it out."
            )

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Is not supported: collectives run on memory of torch's allocator.

        Args:
            backend: as in torch; any value raises.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("set_symm_mem_for_comm is not supported yet. Leave it out.")

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Chooses whether the memory of unsharded parameters is kept when they are resharded, so that pointers into it
        stay valid.

        It holds from the first all-gather on, and until a parameter is replaced by one of another dtype. It is for CUDA
        graphs of a part of a module that are captured while it is unsharded: replay them where it is unsharded again.
        It costs the memory of all unsharded parameters. Where a rank holds whole parameters in the dtype in which they
        compute, pointers stay valid anyway. Every rank must call it.

        A CUDA graph of whole steps, collectives included, needs no setting. Capture it after three eager steps, with
        `.grad` None, without `set_reshard_after_backward(False)`, and leave `zero_grad` out of the loop that replays.

        Args:
            keep: False is the default.
            recurse: True, the default, also sets it for the sharded modules inside this one.
        """
        check_bool("keep", keep)
        set_groups(self, recurse, keep_storage=keep)

    def set_free_viewed_storage(self, free: bool, *, recurse: bool = True) -> None:
        """Chooses whether unsharded parameters are freed although something has kept one, or a view of one, since a
        forward.

        By default they stay: until backward has ended where a forward with grad has left one on `ctx` of an autograd
        function, in a list, or with hooks for saved tensors; and for as long as there is a view of one. Such readers
        are unnoticed, and in a freed parameter they would find any values, or end the process. A warning names them
        once (check "kept memory"). With True the memory is freed, as torch's FSDP2 does. Choose that for a module whose
        autograd functions keep weights on `ctx`, if its own backward alone reads them: bitsandbytes' layers do so. A
        parameter itself, other than a view, still raises an error when it is read in Python while it is freed. Where a
        rank holds whole parameters in the dtype in which they compute, nothing is freed.

        Args:
            free: False is the default.
            recurse: True, the default, also sets it for the sharded modules inside this one.
        """
        check_bool("free", free)
        set_groups(self, recurse, free_viewed_storage=free)


def groups_of_all(name: str, modules: Any) -> tuple[Any, ...]:
    """Returns the groups of `modules`, the value of the argument `name`.

    Raises:
        ValueError: one is not a sharded module.
    """
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"{name}: expected modules that fully_shard was applied to, got {type(module).__name__}")
    return tuple(group for module in modules for group in groups_of(module))


def _on_stream(hook: Callable[[Tensor], None], stream: torch.Stream) -> Callable[[Tensor], None]:
    """Returns `hook` run on `stream`, ordered behind and before what the current stream does."""

    def run(reduced: Tensor) -> None:
        current = torch.accelerator.current_stream(reduced.device)
        stream.wait_stream(current)
        with stream:
            hook(reduced)
        current.wait_stream(stream)

    return run
