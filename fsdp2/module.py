"""Defines FSDPModule, the methods that a user may call on a sharded module, share_comm_ctx, and sharded classes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .bridge.torch_interface import require_torch_state
from .calls.user_classes import class_lock, make_subclass
from .calls.user_code import hides_modes
from .checks.comm_hooks import check_comm_hook, is_of_fsdp1
from .codecs.comm_hook import CommHook
from .collectives import choose as collectives
from .devices import streams
from .engine.events import extensions
from .engine.group_parameters import Rebuild
from .engine.module_class import class_attributes
from .engine.policy import KeepUntil, check_bool
from .engine.state import groups_below, groups_of, require_root, require_state, states_of
from .features.accumulate import unsynchronized
from .features.conditional import set_conditional
from .features.copying import copying_methods
from .features.optimizer_in_backward import use_in_backward
from .features.passes import finalize, reduce_unsynchronized, reset, wait_for
from .torch_private.internals import EXPORT_PLAIN

if TYPE_CHECKING:
    from .engine.group import FSDPParamGroup
    from .engine.root import Root


class FSDPModule:
    """The class that `fully_shard` and `replicate` add to the class of a module.

    The class of a sharded module is a subclass of its own class and of FSDPModule. So `isinstance(model, FSDPModule)`
    tells whether a module is sharded, and tells a type checker that it has the methods below.

    Call each method on every rank, with the same arguments, between steps: not while a forward or backward runs. A
    method acts on the groups of this module: the parameters that the `fully_shard` call on it manages. With
    `recurse=True` it also acts on the groups of all sharded modules inside this one. Methods that say "on the root
    only" act on all groups of the model. The root is the outermost sharded module.

    Example:
        ```python
        model = fully_shard(model)
        assert isinstance(model, FSDPModule)
        model.set_requires_gradient_sync(False)
        ```
    """

    # ---- parameters and gradients of groups

    @hides_modes
    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers the parameters of this module's own groups and registers the unsharded ones in its modules.

        Unsharded parameters are plain tensors in the policy's `param_dtype`. They stay until `reshard` is called, or
        until a forward with grad or a backward that reshards has ended. Forwards without grad use them, however many
        there are; they gather again, once, after a weight has changed. What you write to unsharded parameters is lost:
        write inside `full_params(module, writeback=True)`. Every rank must call it.

        Args:
            async_op: True returns at once, with a handle. `wait` of the handle, or the next forward of this module,
                finishes the all-gather. If a forward finishes it, the parameters stay no longer than after an
                all-gather of its own.

        Returns:
            An UnshardHandle with `async_op=True`, else None.

        Example:
            `block.unshard(async_op=True)` begins the all-gather of a block before other work.
        """
        check_bool("async_op", async_op)
        groups = groups_of(self)
        for group in groups:
            group.reshard_stale()
            group.keep(KeepUntil.NEXT_PASS)
            group.start_unshard()
        handle = UnshardHandle(groups)
        if async_op:
            return handle
        handle.wait()
        return None

    @hides_modes
    def reshard(self) -> None:
        """Frees the unsharded parameters of this module's own groups and registers the sharded ones.

        The sharded parameters take the `requires_grad` that the unsharded ones have been given. It does not
        communicate.

        Raises:
            RuntimeError: an unsharded parameter was written to, or its `.data` was assigned; the change is lost.
        """
        groups = groups_of(self)
        try:
            for group in groups:
                group.parameters.adopt_requires_grad()
                for notify in group.events.before_reshard:
                    notify(group)
        finally:
            for group in groups:
                group.reshard_if_idle()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Chooses whether the backward passes that follow reduce gradients over the ranks.

        While it is False, unsharded gradients accumulate on each rank, in the reduce dtype. `.grad` then holds a
        placeholder that raises when it is used, except by `zero_grad`. The next backward that reduces includes the
        accumulated gradients. Every rank must call it. Unsharded gradients need as much memory as all parameters in the
        reduce dtype.

        Args:
            requires_gradient_sync: False for all backward passes of an accumulation but the last. The default is True.
            recurse: True, the default, also sets it for the sharded modules inside this one.

        Example:
            `model.set_requires_gradient_sync(i == last)` before each backward of an accumulation.
        """
        check_bool("requires_gradient_sync", requires_gradient_sync)
        set_groups(self, recurse, reduce_gradients=requires_gradient_sync, all_reduce=requires_gradient_sync)

    def no_sync(self) -> AbstractContextManager[None]:
        """Returns a context in which backward passes accumulate gradients on each rank, and communicate none.

        It does what `set_requires_gradient_sync(False)` does, for this module and all sharded ones inside. Each of them
        gets its setting of before when the block ends, also by an exception. The next backward that reduces includes
        what was accumulated. The forward may run inside or before. DDP and FSDP1 have a method of this name. Every rank
        must enter it.

        Example:
            `with model.no_sync(): loss.backward()` for all micro-batches but the last.
        """
        return unsynchronized(groups_below(cast(nn.Module, self)))

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Chooses whether the backward passes that follow sum gradients over replicas (HSDP, `replicate`).

        While it is False, each replica reduce-scatters its own gradients, and each rank accumulates its sharded ones.
        `.grad` then holds a placeholder that raises when it is used, except by `zero_grad`. The next backward with True
        sums all of them. Where there are no replicas (a mesh of one axis that shards, one rank), gradients are complete
        at once. Every rank must call it.

        Args:
            requires_all_reduce: False for all backward passes of an accumulation but the last. The default is True.
            recurse: True, the default, also sets it for the sharded modules inside this one.
        """
        check_bool("requires_all_reduce", requires_all_reduce)
        set_groups(self, recurse, all_reduce=requires_all_reduce)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Chooses whether forward frees the unsharded parameters, so that backward gathers them again.

        It replaces what `fully_shard` was given, also an int. It has no effect where a rank holds whole parameters (one
        rank, or replicas only) in the dtype in which they compute: modules then compute with these themselves. Every
        rank must call it.

        Args:
            reshard_after_forward: True frees them: less memory, one more all-gather. False keeps them until backward
                ends.
            recurse: True, the default, also sets it for the sharded modules inside this one.
        """
        check_bool("reshard_after_forward", reshard_after_forward)
        set_groups(self, recurse, reshard_after_forward=reshard_after_forward)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Chooses whether backward frees the unsharded parameters.

        While it is False, the next forward uses them without an all-gather, for example in gradient accumulation,
        unless a parameter has changed. A step of any torch optimizer and any operation in place are noticed. Call
        `reshard` after a change that is not: by a collective of your own, or through the `.data` of a local tensor. It
        has no effect where a rank holds whole parameters. Every rank must call it.

        Args:
            reshard_after_backward: True, the default, frees them. False keeps them.
            recurse: True, the default, also sets it for the sharded modules inside this one.
        """
        check_bool("reshard_after_backward", reshard_after_backward)
        set_groups(self, recurse, reshard_after_backward=reshard_after_backward)

    # ---- how groups communicate, and what they keep

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

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Chooses whether a parameter without a gradient on this rank takes part in reductions, with zeros.

        Use it where ranks use different parameters of one group, so that another rank may have a gradient of it.
        Gradients are then reduced when backward leaves the module, not before. A parameter that no rank uses gets a
        gradient of zeros instead of None, also on one rank. For whole modules that only some ranks run, use
        `fully_shard(module, conditional=True)`. Every rank must call it.

        Args:
            reduce_scatter_unused_params: False is the default.
            recurse: True, the default, also sets it for the sharded modules inside this one.
        """
        check_bool("reduce_scatter_unused_params", reduce_scatter_unused_params)
        set_groups(self, recurse, reduce_unused=reduce_scatter_unused_params)

    @hides_modes
    def set_conditional(self, conditional: bool = True) -> None:
        """Allows each rank to leave this module out of any forward, as `fully_shard(module, conditional=True)` does.

        It is for code in which a library calls `fully_shard`. Sharded modules inside this one are conditional with it.
        Parameters that no sharded module inside has belong to a module around it, which all ranks run: call
        `set_reduce_scatter_unused_params(True)` on the root if some of them are of the module that ranks leave out.
        On one rank it changes nothing. Every rank must call it, before the first forward.

        Args:
            conditional: False takes it back.

        Raises:
            RuntimeError: a forward has run already.
            NotImplementedError: as for `fully_shard` with `conditional=True`.
        """
        check_bool("conditional", conditional)
        set_conditional(require_state(self), conditional)

    def set_gradient_divide_factor(self, factor: float, *, recurse: bool = False) -> None:
        """Divides the sum of all ranks' gradients by `factor`, in place of the number of ranks.

        Call it on the root with `recurse=True`: without, it reaches the groups of this module only, not those of its
        blocks. All groups of a model on one mesh must divide by the same number, else a forward soon raises a
        RuntimeError. Groups on another mesh (experts) may divide by another number. Every rank must call it.

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

    def set_gradient_buckets(self, nbytes: int | None, *, recurse: bool = True) -> None:
        """Chooses how many bytes of gradients are reduced by one collective, where a group has more.

        Smaller buckets are sent earlier in backward, and freed earlier; each costs a collective's latency and, on a
        device, launches. A gradient that is larger than a bucket is a bucket by itself. Buckets do not reach over
        groups. Every rank must call it.

        Args:
            nbytes: of whole gradients, in the dtype in which they are summed; at least 1. None, the default: about
                four buckets of a group on CPU, one of up to 1 GiB on other devices.
            recurse: True, the default, also sets it for the sharded modules inside this one.

        Raises:
            TypeError: neither an int nor None.
            ValueError: less than 1.
            RuntimeError: during a forward or backward.

        Example:
            `model.set_gradient_buckets(25 * 2**20)` is DDP's `bucket_cap_mb=25`.
        """
        if nbytes is not None and (not isinstance(nbytes, int) or isinstance(nbytes, bool)):
            raise TypeError(f"nbytes: expected an int or None, got {nbytes!r}")
        if nbytes is not None and nbytes < 1:
            raise ValueError(f"nbytes: expected at least 1, got {nbytes}")
        root = require_state(self).root
        if root.running or root.is_in_backward():
            raise RuntimeError("set_gradient_buckets: call it between steps, not during a forward or backward")
        set_groups(self, recurse, bucket_bytes=nbytes)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Calls `set_gradient_divide_factor` for the groups of this module. This is its old name.

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
        one rank it is called, too, with the gradients of that rank. Every rank must
        call it.

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

    def register_comm_hook(self, state: object, hook: Callable[..., Any] | None) -> None:
        """Has ranks reduce gradients by a hook of yours, as the methods of this name of DDP and FSDP1 do.

        Between replicas (HSDP, `replicate`) it has DDP's shape: `hook(state, bucket)` returns a torch.futures.Future of
        a flat tensor: the mean over replicas of `bucket.buffer()`, which it may write to. torch's own hooks are such
        functions: `allreduce_hook`, `bf16_compress_hook`, `fp16_compress_hook` and `powerSGD_hook` of
        `torch.distributed.algorithms.ddp_comm_hooks`. `bucket` is a `fsdp2.compression.GradBucket`: it has the methods
        of `dist.GradBucket`, and `names` and `shapes`. With HSDP it holds the shards of this rank, which the ranks of a
        replica have reduced. Then the process group in `state` must be that of the replicas:
        `mesh.get_group("replicate")`, whatever the axis is called.

        Where ranks shard and there are no replicas it has FSDP1's shape: `hook(state, gradient, shard)` fills `shard`
        with the mean of this rank's segments of `gradient`, a flat tensor of a segment for each rank, in the reduce
        dtype, with zeros for padding. It may write to both, and give them other memory (`shard.data = ...`). torch's
        own are `reduce_scatter_hook`, `bf16_compress_hook` and `fp16_compress_hook` of
        `torch.distributed.algorithms._comm_hooks.default_hooks`; the last two need a device, as with FSDP1. Between
        replicas these are taken, too, without `shard`.

        All groups below this module use it, in place of the policy's compression. Buckets are smaller than DDP's:
        those of a group. On one rank it is not called. On CPU the host waits for each hook: a codec is faster. Every
        rank must call this, between steps.

        Args:
            state: the first argument of the hook; torch's hooks take a process group, None for all ranks, or a state
                that has one.
            hook: such a function. None: reduce as before.

        Raises:
            TypeError: `hook` is neither a function nor None.
            ValueError: a hook of torch is given a process group of other ranks; or ranks that shard have a
                compression of reduce_scatter, or a custom reduce-scatter.
            NotImplementedError: the hook has the other shape; the mesh has an `outer_shard`; a hook of torch for FSDP1
                on the CPU.

        Example:
            `model.register_comm_hook(None, bf16_compress_hook)` of a model under `replicate`
        """
        if hook is not None and not callable(hook):
            raise TypeError(f"hook: expected a function of a state and a bucket, or None, got {hook!r}")
        groups = chosen_groups(self, True)
        for group in groups if hook is not None else ():
            check_comm_hook(group, state, hook)
        shared = None if hook is None else CommHook(state, hook, is_of_fsdp1(hook))
        for group in groups:
            group.set(comm_hook=shared)
            if group.mesh.size > 1 and not group.mesh.replicate_axes:
                collectives.follow(group)
            group.parameters.rebuild(Rebuild.TRAINABLE)

    def set_custom_all_gather(self, comm: Any) -> None:
        """Gathers the groups of this module by an object of yours, in one flat call for each group.

        The object has two methods. `allocate(size, *, dtype, device)` returns the output, a flat tensor; the input is
        this rank's part of it. `__call__(output_tensor, input_tensor, group, async_op)` fills the output, and returns a
        Work to wait for, or None when it is done. Both tensors are bytes (uint8), whatever the dtypes of the
        parameters. Secondary shards (`reshard_after_forward=k`, `outer_shard`) are gathered without it. On one rank
        it is never called. Every rank must call it.

        Args:
            comm: such an object. None: the usual all-gather.

        Raises:
            TypeError: it can't be called, or has no `allocate`.
            ValueError: there are several ranks, and all hold whole parameters, so that it would never be called.
        """
        self._choose_collective("all_gather", comm, "Nothing is gathered")

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Reduces the gradients of this module's groups by an object of yours, in one flat call for each bucket.

        The object has two methods. `allocate(size, *, dtype, device)` returns a flat tensor in the reduce dtype; it is
        called for the input and for the output. `__call__(output_tensor, input_tensor, group, op, async_op)` reduces,
        and returns a Work to wait for, or None when it is done. On one rank, and for modules without parameters, see
        `set_custom_all_gather`. Every rank must call it.

        Args:
            comm: such an object. None: the usual reduce-scatter.

        Raises:
            TypeError: it can't be called, or has no `allocate`.
            ValueError: the policy compresses reduce_scatter; or several ranks all hold whole parameters, and scatter
                nothing.
            NotImplementedError: the mesh has an `outer_shard`, so that gradients are scattered in two steps.
        """
        for group in groups_of(self) if comm is not None else ():
            if group.mesh.has_outer_shard:
                raise NotImplementedError(
                    f"reduce_scatter: expected None on {group.mesh.topology}, where gradients are scattered in two "
                    f"steps, got {comm!r}"
                )
        for group in groups_of(self) if comm is not None else ():
            if group.scatter_hook is not None:
                raise ValueError(
                    f"reduce_scatter: expected None where register_comm_hook has a hook reduce, got {comm!r}"
                )
        for state in states_of(self):
            if comm is not None and state.policy.compression.reduce_scatter is not None:
                raise ValueError(
                    "reduce_scatter: expected None where the policy compresses reduce_scatter, by "
                    f"{state.policy.compression.reduce_scatter!r}: gradients are exchanged then, got {comm!r}"
                )
        why = "Replicas all-reduce their gradients; what they have summed can be changed by set_all_reduce_hook(hook)"
        self._choose_collective("reduce_scatter", comm, why)

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
            if collective is not None and collectives.choice_of(group).memory is not None:
                raise ValueError(
                    f"{kind}: expected None where set_allocate_memory_from_process_group_for_comm or "
                    "set_symm_mem_for_comm has been called: a custom one allocates what it sends and fills. Leave one "
                    "of both out."
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
        """Chooses whether what this module's groups send, gather and reduce lies in memory that NCCL registers.

        NCCL then sends straight from there and into it, which is faster on machines whose links or switches can do
        that. The memory comes from one pool for all groups of a device, to which it returns when they reshard;
        activations do not use it, so that a step may reserve up to the bytes of the groups that are unsharded at once
        more. Gradients are packed into it, also those that are reduced where autograd has put them otherwise.
        Compressed gradients are sent from torch's memory. It has no effect on a process group whose backend has no
        memory of its own, such as gloo, and on one rank. It has not run on several GPUs.

        Every rank must call it, between steps; the first call communicates.

        Args:
            enable: True: memory of the process group. False: of torch's allocator.

        Raises:
            ValueError: `set_custom_all_gather` or `set_custom_reduce_scatter` has been called.
        """
        check_bool("enable", enable)
        self._choose_memory("enable=True", "communicator" if enable else None)

    def set_symm_mem_for_comm(self, backend: str | None = "NCCL") -> None:
        """Gathers this module's groups in torch's symmetric memory, for which NCCL has faster all-gathers.

        Within a machine they can run on copy engines, if the process group has the zero-CTA policy
        (`NCCL_CTA_POLICY=2`). Gradients are reduced in such memory only after
        `set_force_sum_reduction_for_comms(True)`: what NCCL does there sums and can't average; fp16 never is. Memory is
        as with `set_allocate_memory_from_process_group_for_comm`; the last of both calls counts. It has no effect on
        one rank. It has not run on several GPUs.

        Every rank must call it, between steps; the first call communicates.

        Args:
            backend: "NCCL". None: memory of torch's allocator again.

        Raises:
            ValueError: another backend; or `set_custom_all_gather` or `set_custom_reduce_scatter` has been called.
            RuntimeError: the collectives do not run on NCCL.
        """
        if backend not in ("NCCL", None):
            raise ValueError(f'backend: expected "NCCL" or None, got {backend!r}')
        for group in groups_of(self) if backend is not None else ():
            collectives.require_nccl(group)
        self._choose_memory(f"backend={backend!r}", None if backend is None else "symmetric")

    def _choose_memory(self, argument: str, memory: Literal["communicator", "symmetric"] | None) -> None:
        for group in groups_of(self) if memory is not None else ():
            choice = collectives.choice_of(group)
            if choice.all_gather is not None or choice.reduce_scatter is not None:
                raise ValueError(
                    f"{argument}: expected no set_custom_all_gather and no set_custom_reduce_scatter before, whose "
                    "objects allocate what they send and fill. Leave one of both out."
                )
        for group in groups_of(self):
            collectives.choose(group, memory=memory)

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Chooses whether the memory of unsharded parameters is kept when they are resharded, so that pointers into it
        stay valid.

        It holds from the first all-gather on, and until a parameter is replaced by one of another dtype. It is for CUDA
        graphs of a part of a module that are captured while it is unsharded: replay them where it is unsharded again.
        It costs the memory of all unsharded parameters. Where a rank holds whole parameters in the dtype in which they
        compute, pointers stay valid anyway. Every rank must call it.

        A CUDA graph of whole steps, collectives included, needs no setting. Capture it after three eager steps, with
        `.grad` None, and leave `zero_grad` out of the loop that replays. A pass in which the host takes part raises
        RuntimeError while it is captured: with offload_policy, conditional=True, `set_reshard_after_backward(False)`.

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
        are unnoticed, and in a freed parameter they would find any values, or end the process. With True
        the memory is freed, as torch's FSDP2 does. Choose that for a module whose
        autograd functions keep weights on `ctx`, if its own backward alone reads them: bitsandbytes' layers do so. A
        parameter itself, other than a view, still raises an error when it is read in Python while it is freed. Where a
        rank holds whole parameters in the dtype in which they compute, nothing is freed.

        Args:
            free: False is the default.
            recurse: True, the default, also sets it for the sharded modules inside this one.
        """
        check_bool("free", free)
        set_groups(self, recurse, free_viewed_storage=free)

    # ---- all groups under a root

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Chooses whether a backward ends the forwards that have run, or further backward passes go through them.

        With several backward passes through the same forwards (`retain_graph=True`, a loss for each output), pass False
        before all but the last. Then the record of the forwards is kept, so that their groups are gathered ahead in
        each of these passes. Where ranks hold whole parameters nothing is gathered. Numbers are right in any case. It
        may be called on any module under the root, and acts on the whole model.

        Args:
            is_last_backward: True, the default: no backward comes back to the forwards that have run. False: one does.
        """
        check_bool("is_last_backward", is_last_backward)
        require_state(self).root.set(is_last_backward=is_last_backward)

    @hides_modes
    def reset_iter_state(self) -> None:
        """Drops what an exception in forward or backward has left half done. On the root only.

        That is: unsharded parameters, gradients on their way, and unsynchronized gradients. After a failed backward
        this happens by itself, but then the gradients of earlier, complete passes stay. Every rank must call it.

        Raises:
            RuntimeError: not the root.
        """
        reset(require_root(self, "reset_iter_state"))

    def set_unsharded_budget(self, nbytes: int | None) -> None:
        """Chooses how many bytes of unsharded parameters may be in memory besides those in use. On the root only.

        The budget is for two things. Groups stay unsharded from one use to the next, so that micro-batches, backward
        passes, forwards of an evaluation and stages of a pipeline gather them once until an optimizer step changes
        them; frozen groups stay over steps. What is left of the budget is gathered ahead of use, at least the next
        group if it fits. The choice is by sizes and by the order of the last pass, alike on all ranks; for blocks of
        one size, no other choice gathers less. A budget of all groups gathers each once a step.

        In use are the root's own group, the groups whose modules run, and the last one that ran. In backward a group
        may begin before the one behind it has left, and in a backward of several forwards the first group stays. A
        group counts with its bytes in compute dtypes, as `describe` prints them. How many micro-batches a step has is
        taken from the last step: the first steps gather more. The budget also keeps groups with
        `reshard_after_forward=True`, and decides in place of `set_reshard_after_backward`, which torch's pipelines
        call; what `reshard_after_forward=False` keeps, it does not count. Conditional modules do not stay. It has no
        effect where ranks hold whole parameters in the dtype in which they compute. Each stage of a pipeline is a root.
        Every rank must call it with the same number. All ranks must write to the same weights between passes, also
        where their shards are empty: what was written to is gathered again.

        Args:
            nbytes: 0 gathers nothing ahead, and keeps the last group alone from forward to backward. None, the default:
                the next group is gathered ahead whatever its size, and more only while they are together no larger
                than a typical group; the same groups stay at the end of forward.

        Raises:
            TypeError: neither an int nor None.
            RuntimeError: not the root.
            ValueError: less than 0.

        Example:
            `model.set_unsharded_budget(12 * 2**30)` spends 12 GiB.
        """
        if nbytes is not None and (not isinstance(nbytes, int) or isinstance(nbytes, bool)):
            raise TypeError(f"nbytes: expected an int or None, got {nbytes!r}")
        if nbytes is not None and nbytes < 0:
            raise ValueError(f"nbytes: expected at least 0, got {nbytes}")
        require_root(self, "set_unsharded_budget").set(unsharded_budget=nbytes)

    def set_running_stats_averaging(self, enabled: bool) -> None:
        """Chooses whether ranks average `running_mean` and `running_var` of BatchNorm and the like. On the root only.

        They are averaged, all in one all-reduce, when a forward in training mode ends, so they are right whenever they
        are read; where checkpointing runs a BatchNorm again in backward, when that is over. BatchNorm still normalises
        with the statistics of each rank's own rows. Every rank must call it.

        Args:
            enabled: True, the default. False: each rank keeps those of its own rows. On one rank both are the same.

        Raises:
            RuntimeError: not the root.
        """
        check_bool("enabled", enabled)
        root = require_root(self, "set_running_stats_averaging")
        root.set(averages_running_stats=enabled)

    def set_post_optim_event(self, event: Any) -> None:
        """Has the next forward of the root wait for `event`, once, before it reads the parameters.

        It is for an optimizer that steps on a stream of its own: the forward waits for the event in addition to what
        the current stream has been given to do. It may be called on any module under the root.

        Args:
            event: a torch.Event that was recorded behind the step. None: wait for none.

        Raises:
            TypeError: `event` has no method `wait`.
        """
        if event is not None and not callable(getattr(event, "wait", None)):
            raise TypeError(f"event: expected a torch.Event or None, got {event!r}")
        wait_for(require_state(self).root, event)

    @hides_modes
    def set_optimizer_in_backward(self, optimizer: Optimizer | None) -> None:
        """Has backward step `optimizer` on gradients as soon as they are reduced, and clear them. On the root only.

        Few gradients then exist at once. Do not call `optimizer.step()` yourself. When backward returns, all steps are
        done (with `set_manual_backward_finalization`, when that is finished). With CPUOffloadPolicy the steps, and
        hooks of parameters, run on another thread while backward goes on: neither may communicate.

        A pass without synchronisation (`set_requires_gradient_sync`, `set_requires_all_reduce`) does not step; the one
        that reduces its gradients steps once. After a step, `.grad` holds a placeholder that raises when it is used:
        clipping by norm and GradScaler need all gradients before the first step. A backward that raises may have
        stepped on some parameters. Every rank must call it.

        Args:
            optimizer: one that keeps its state per parameter, as those of torch.optim do. None: you step again.

        Raises:
            TypeError: neither an optimizer nor None.
            ValueError: it needs a closure, or has parameters that are not sharded here.
            RuntimeError: not the root, or during a backward pass. Later, in backward: a second gradient of a parameter
                that was stepped on in the same pass (reentrant checkpointing).
        """
        root = require_root(self, "set_optimizer_in_backward")
        if root.is_in_backward():
            raise RuntimeError("set_optimizer_in_backward: call it between backward passes, not during one")
        use_in_backward(root, optimizer)

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Chooses whether reductions may be in flight after backward, until `finalize_backward`. On the root only.

        Args:
            enabled: True: `.grad` is complete only after `finalize_backward`, also on one rank. Call it before you clip
                or step. False, the default: `.grad` is complete when backward returns.

        Raises:
            RuntimeError: not the root, or during a backward pass.
        """
        check_bool("enabled", enabled)
        root = require_root(self, "set_manual_backward_finalization")
        if root.is_in_backward():
            raise RuntimeError("set_manual_backward_finalization: call it between backward passes, not during one")
        root.set(finalize_backward=not enabled)

    @hides_modes
    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Finishes the reductions of all backward passes since the last call, and sets `.grad`. On the root only.

        It also reduces unsynchronized gradients of earlier passes, if synchronisation has been switched on again since
        (`set_requires_gradient_sync`). Every rank must call it.

        Args:
            async_op: True returns a handle whose `wait` finishes the work. Call `wait` before gradients are used, and
                before other work on this root begins.

        Returns:
            A GradientReductionHandle with `async_op=True`, else None.

        Raises:
            RuntimeError: not the root.
        """
        check_bool("async_op", async_op)
        root = require_root(self, "finalize_backward")
        reduce_unsynchronized(root)
        handle = GradientReductionHandle(root)
        if async_op:
            return handle
        handle.wait()
        return None

    def _get_fsdp_state(self) -> Any:
        return require_torch_state(self)

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Checks its argument. All-gathers are always asynchronous, into memory that the compute stream allocates."""
        check_bool("async_op", async_op)

    def __prepare_scriptable__(self) -> Any:
        """Refuses `torch.jit.script`, which calls this for each module in a model before anything else."""
        names = [param.name for group in groups_below(cast(nn.Module, self)) for param in group.params]
        raise NotImplementedError(
            f"torch.jit.script({type(self).__name__}): TorchScript can't gather {', '.join(names[:1])}, which "
            f"fully_shard manages. {EXPORT_PLAIN} To make training fast, use torch.compile."
        )


class UnshardHandle:
    """An all-gather in flight, started by `FSDPModule.unshard(async_op=True)`."""

    def __init__(self, groups: list[FSDPParamGroup]) -> None:
        self._groups = groups

    @hides_modes
    def wait(self) -> None:
        """Finishes the all-gather and registers the unsharded parameters. Further calls do nothing. The next forward of
        the module waits by itself.
        """
        groups, self._groups = self._groups, []
        for group in groups:
            if group.keep_until < KeepUntil.NEXT_PASS:  # a forward, or reshard(), has given it up since
                continue
            group.unshard(for_backward=group.root.backward is not None)
            group.root.mark_in_use(group)
            group.keep(KeepUntil.USER)
            group.root.settle_transfers()


def chosen_groups(module: FSDPModule, recurse: bool) -> list[FSDPParamGroup]:
    """Returns the groups that a method with `recurse` acts on."""
    check_bool("recurse", recurse)
    return groups_below(cast(nn.Module, module)) if recurse else groups_of(module)


def set_groups(module: FSDPModule, recurse: bool, **changes: Any) -> list[FSDPParamGroup]:
    """Changes settings of the groups that a method acts on, and returns these."""
    groups = chosen_groups(module, recurse)
    for group in groups:
        group.set(**changes)
    return groups


def groups_of_all(name: str, modules: Iterable[Any]) -> tuple[FSDPParamGroup, ...]:
    """Returns the groups of `modules`, the value of the argument `name`.

    Raises:
        TypeError: they are no sequence.
        ValueError: one is not a sharded module.
    """
    if not isinstance(modules, Iterable):
        raise TypeError(f"{name}: expected a list of sharded modules, got {type(modules).__name__}")
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


class GradientReductionHandle:
    """Reductions in flight, which `FSDPModule.finalize_backward(async_op=True)` leaves to be finished."""

    def __init__(self, root: Root) -> None:
        self._root: Root | None = root
        self._resets = root.num_resets

    @hides_modes
    def wait(self) -> None:
        """Finishes them. Further calls do nothing.

        Raises:
            RuntimeError: `reset_iter_state` was called since.
        """
        root, self._root = self._root, None
        if root is None:
            return
        if root.num_resets != self._resets:
            raise RuntimeError("the reductions this handle waits for were dropped by reset_iter_state")
        finalize(root)


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Bounds the reductions in flight of several roots together, for example of the stages of a pipeline on one rank.

    Reductions that are in flight in any of them go on. An empty list, or one root, changes nothing.

    Args:
        modules: sharded modules, each of another root.

    Raises:
        ValueError: one is not a sharded module.
    """
    groups = groups_of_all("modules", modules)
    for group in groups[1:]:
        group.root.share_queue(groups[0].root.queue)


@cache
def public_methods() -> frozenset[str]:
    """Returns the names that fully_shard adds to a module."""
    return frozenset(name for name in vars(FSDPModule) if not name.startswith("_"))


# ---- the class of sharded modules


def sharded_class(cls: type) -> type:
    """Returns the class that a module of `cls` gets: "FSDP" + its name, a subclass of `cls` and FSDPModule.

    FSDPModule comes last, because Python allows `module.__class__ = ...` for every layout only so (ABC and Generic have
    layouts of their own); what overrides nn.Module therefore stands in the new class itself.
    """
    with class_lock:  # it must be made once
        made: type = _sharded_class(cls)
        return made


@cache
def _sharded_class(cls: Any) -> Any:
    body: dict[str, Any] = {"__module__": cls.__module__, "__doc__": cls.__doc__}
    for attributes in extensions().class_attributes:
        body.update(attributes(cls))
    body.update(class_attributes(cls))
    body.update(copying_methods(cls, _new_sharded))
    return make_subclass(cls, f"FSDP{cls.__name__}", (cls, FSDPModule), body)


def _new_sharded(cls: type) -> nn.Module:
    """Returns a sharded module of class `cls` to be filled by `__setstate__`. Pickles of sharded modules name it."""
    sharded: Any = sharded_class(cls)
    return object.__new__(sharded)  # type: ignore[no-any-return]
