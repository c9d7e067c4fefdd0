"""FSDPModule: what a user may call on a sharded module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from torch import Tensor

from . import streams
from .handles import UnshardHandle
from .modes import hides_modes
from .reduce import on_stream
from .root_methods import RootMethods, check_bool
from .state import FSDPState, require_state, states_below, states_of


class FSDPModule(RootMethods):
    """Base of every module that `fully_shard` was applied to, besides its own class."""

    @hides_modes
    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's own group and register the full parameters, in the policy's `param_dtype`.

        Every rank must call it. They stay until `reshard` is called, or a forward with grad, or a backward, ends that
        reshards. Forwards without grad use them, however many: only after a weight has changed do they gather the group
        again, once. What is written to them is lost. A step of an optimizer gathers them anew.

        Args:
            async_op: return at once, with a handle whose `wait` finishes the work. If a forward finishes it instead,
                the parameters stay no longer than after a gather of its own.
        """
        check_bool("async_op", async_op)
        states = list(states_of(self))
        for state in states:
            state.context.forget_stale([state])
            state.hold()
            state.group.start_unshard()
        handle = UnshardHandle(states)
        if async_op:
            return handle
        handle.wait()
        return None

    @hides_modes
    def reshard(self) -> None:
        """Free the full parameters of this module's own group and register the sharded ones, with the `requires_grad`
        that they have been given.

        Raises:
            RuntimeError: a full parameter was written to, or its `.data` was assigned, which is lost.
        """
        states = list(states_of(self))
        written = [name for state in states for name in state.group.versions.take_written()]
        written += [name for state in states if state.group.is_unsharded for name in state.group.adopted.take_moved()]
        for state in states:
            state.group.adopted.keep_requires_grad()
            state.is_pinned = False
            state.release()
        if written:
            raise RuntimeError(
                f"{', '.join(dict.fromkeys(written))}: modified, or `.data` assigned, between unshard() and reshard(), "
                "which is lost. Write inside `with fsdp2.full_params(module, writeback=True):`, or to the sharded "
                "parameter; change a shape (resize an embedding) before fully_shard."
            )

    # Setters. Each acts on this module's own group and, with `recurse`, on those of the sharded modules inside it.
    # Call them on every rank alike, between steps. The default of `recurse` is torch's: False where torch has no such
    # argument.

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Choose whether the backward passes that follow reduce gradients between ranks.

        Without, full gradients accumulate on each rank in the reduce dtype, and `.grad` holds a stand-in that only
        `zero_grad` may be applied to. The next backward that reduces includes them.

        Args:
            requires_gradient_sync: False for all but the last backward of an accumulation.
        """
        check_bool("requires_gradient_sync", requires_gradient_sync)
        for state in _states(self, recurse):
            state.group.gradients.synchronise = requires_gradient_sync
            state.group.gradients.reduction.all_reduce = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Choose whether the backward passes that follow sum gradients between replicas, too (HSDP, `replicate`).

        Without, each rank accumulates its shard of its own replica's gradients, and `.grad` holds a stand-in as above.
        Where there are no replicas to sum between (one axis that shards, one rank), gradients are complete at once.
        """
        check_bool("requires_all_reduce", requires_all_reduce)
        for state in _states(self, recurse):
            state.group.gradients.reduction.all_reduce = requires_all_reduce

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Choose whether the full parameters are freed after forward (and gathered again in backward). This replaces
        an int given to `fully_shard`. Where a rank holds whole parameters (one rank, replicas), in the dtype in which
        they compute, modules compute with these themselves: there is nothing to free.
        """
        check_bool("reshard_after_forward", reshard_after_forward)
        for state in _states(self, recurse):
            state.reshard_after_forward, state.keeps_part = reshard_after_forward, False

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Choose whether the full parameters are freed after backward.

        Without, the next forward uses them (in gradient accumulation, say) unless a parameter has changed: after a step
        of any torch optimizer, or an operation in place, they are gathered anew. Call `reshard` after changes that show
        nowhere: by a collective, or through the `.data` of a local tensor. Where a rank holds whole parameters there is
        nothing to free, as above.
        """
        check_bool("reshard_after_backward", reshard_after_backward)
        for state in _states(self, recurse):
            state.reshard_after_backward = reshard_after_backward
            state.group.notes_changes = not reshard_after_backward

    def set_unshard_in_backward(self, unshard_in_backward: bool, *, recurse: bool = False) -> None:
        """Choose whether the full parameters are gathered when backward reaches the module.

        Without (an embedding's backward doesn't read its weight), they are gathered only if something needs them. Where
        a rank holds whole parameters they are there in any case.
        """
        check_bool("unshard_in_backward", unshard_in_backward)
        for state in _states(self, recurse):
            state.unshard_in_backward = unshard_in_backward

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Begin to gather exactly these when this module's forward begins, in place of what the last pass suggests.

        Modules under another root stay gathered until that runs. Where ranks hold whole parameters there is nothing to
        gather.
        """
        chosen = _states_of("modules", modules)
        for state in states_of(self):
            state.forward_prefetch = chosen

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Begin to gather exactly these when backward reaches this module, in place of what ran before it.

        Modules under another root, and whole parameters: as with `set_modules_to_forward_prefetch`.
        """
        chosen = _states_of("modules", modules)
        for state in states_of(self):
            state.backward_prefetch = chosen

    def set_reduce_scatter_unused_params(self, enable: bool, *, recurse: bool = True) -> None:
        """Reduce zeros for parameters that got no gradient on this rank, since they may have one on other ranks.

        Gradients then are reduced when backward leaves the module, not before. A parameter that no rank uses gets a
        gradient of zeros instead of None: on one rank, too.
        """
        check_bool("enable", enable)
        for state in _states(self, recurse):
            state.group.gradients.reduces_unused = enable
            state.completes = False

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Let so many reductions be in flight while the next is packed (default 1); each holds its input. There may be
        more if they are small: up to a quarter of a typical group's gradients, and for each one above 1 all of them.
        The largest number set below the root counts, from the next forward on. On one rank no reduction needs time.

        Raises:
            ValueError: less than 1.
        """
        if not isinstance(max_input_buffers, int) or isinstance(max_input_buffers, bool):
            raise TypeError(f"max_input_buffers: expected an int, got {max_input_buffers!r}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers: expected at least 1, got {max_input_buffers}")
        for state in _states(self, recurse):
            state.max_reductions = max_input_buffers

    def set_gradient_divide_factor(self, factor: float, *, recurse: bool = False) -> None:
        """Divide the sum of all ranks' gradients by `factor` instead of the number of ranks.

        All groups of a model on one mesh must divide by the same number: else the next optimizer step raises a
        RuntimeError, and `check` reports it. Groups on another mesh (experts) may divide by another.

        Raises:
            ValueError: not a positive number.
        """
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not factor > 0:
            raise ValueError(f"factor: expected a positive number, got {factor!r}")
        for state in _states(self, recurse):
            state.group.gradients.divide_by(float(factor))

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Old name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool, *, recurse: bool = False) -> None:
        """Sum and divide afterwards, also where the backend could average by itself. (gloo, and one rank, never do.)"""
        check_bool("enable", enable)
        for state in _states(self, recurse):
            state.group.choose_comms(force_sum=enable)

    def set_all_reduce_hook(
        self, hook: Callable[[Tensor], None] | None, *, stream: Any = None, recurse: bool = False
    ) -> None:
        """Call `hook(reduced)` with each flat tensor of reduced shards, before it becomes gradients.

        The tensor has the reduce dtype. The hook may change it in place, for a reduction over further ranks, say. On a
        mesh that replicates it is called after the all-reduce.

        Args:
            hook: None removes it.
            stream: where it runs (a torch.Stream), which the hook must not enter again: torch 2.11 keeps one context in
                each. None: the stream that computes. Only without replicas.

        On one rank it is called, too, with that rank's gradients. If only modules without parameters have a hook, which
        is never called, the next optimizer step raises a RuntimeError.

        Raises:
            TypeError: `hook` is neither a function nor None.
            ValueError: a stream together with HSDP, or on a mesh of CPUs, which have no streams.
        """
        if hook is not None and not callable(hook):
            raise TypeError(f"hook: expected a function or None, got {hook!r}")
        states = list(_states(self, recurse))
        for state in states if stream is not None else ():
            if state.group.gradients.reduction.replicas is not None:
                raise ValueError("stream: expected None on a mesh that replicates, got a stream")
            if not streams.exist_on(state.group.mesh.device):
                raise ValueError(
                    f"stream: expected None on {state.group.mesh.mesh}, which has no streams: leave it out"
                )
        run = hook if hook is None or stream is None else on_stream(hook, stream)
        for state in states:
            state.group.gradients.reduction.hook = run
            state.group.gradients.note_change()

    def set_custom_all_gather(self, all_gather: Any) -> None:
        """Gather this module's group by `all_gather(output_tensor, input_tensor, group, async_op)`, in one flat call.

        `all_gather.allocate(size, *, dtype, device)` provides its output, of which the input is this rank's part. Both
        are bytes (uint8), whatever the parameters' dtypes. It returns a Work, or None when done. What k ranks restore
        after forward (`reshard_after_forward=k`) they gather without it.

        One rank gathers nothing, and never calls it. If only modules without parameters were given one, the next
        optimizer step raises a RuntimeError. None: the usual collective again.

        Raises:
            TypeError: it can't be called, or has no `allocate`.
            ValueError: several ranks, which all hold whole parameters: they would never call it.
        """
        self._choose_collective("all_gather", all_gather, "Nothing is gathered")

    def set_custom_reduce_scatter(self, reduce_scatter: Any) -> None:
        """Reduce by `reduce_scatter(output_tensor, input_tensor, group, op, async_op)`, in one flat call per bucket.

        `reduce_scatter.allocate(size, *, dtype, device)` provides both tensors, in the reduce dtype.

        One rank, and modules without parameters: as with `set_custom_all_gather`.

        Raises:
            TypeError: it can't be called, or has no `allocate`.
            ValueError: the policy has a `wire_dtype`; or several ranks all hold whole parameters, and scatter nothing.
        """
        for state in states_of(self):
            if reduce_scatter is not None and state.policy.wire_dtype is not None:
                raise ValueError(
                    "reduce_scatter: expected None where the policy has a wire_dtype, in which gradients are exchanged "
                    f"and not reduced, got {reduce_scatter!r}"
                )
        why = "Replicas all-reduce their gradients; what they have summed can be changed by set_all_reduce_hook(hook)"
        self._choose_collective("reduce_scatter", reduce_scatter, why)

    def _choose_collective(self, kind: str, collective: Any, why: str) -> None:
        states = list(states_of(self))
        if collective is not None:
            if not callable(collective) or not callable(getattr(collective, "allocate", None)):
                raise TypeError(f"{kind}: expected a callable with a method `allocate`, or None, got {collective!r}")
            meshes = [state.group.mesh for state in states]
            if all(mesh.size == 1 for mesh in meshes) and any(mesh.num_ranks > 1 for mesh in meshes):
                raise ValueError(
                    f"{kind}: expected None on {meshes[0].mesh}, all ranks of which hold whole parameters: it would "
                    f"never be called. {why}. Leave set_custom_{kind} out."
                )
        for state in states:
            state.group.choose_comms(**{kind: collective})
            state.group.gradients.note_change()

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Reduce on a process group of its own, so that a backend that runs one collective at a time per group can
        gather at the same time. Every rank must call it; ranks of other shards need not,
        unless `init_process_group` was given a `device_id`, by which NCCL splits the group of all. Where ranks hold
        whole parameters nothing is gathered that a reduction could wait for.
        """
        check_bool("enable", enable)
        for state in _states(self, recurse):
            state.group.choose_comms(separate=enable)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Declared, and refused: full parameters are gathered into memory of their own, which is what False asks for.

        Raises:
            NotImplementedError: `enable` is True.
        """
        check_bool("enable", enable)
        if enable:
            raise NotImplementedError(
                "set_allocate_memory_from_process_group_for_comm is not supported yet. Leave it out."
            )

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Declared, and refused: collectives run on memory of torch's allocator.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("set_symm_mem_for_comm is not supported yet. Leave it out.")

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Keep the memory of the full parameters when they are resharded, so that pointers into it stay valid: from the
        first gather on, and until a parameter is replaced by one of another dtype.

        For CUDA graphs of a part of a module, captured while it is unsharded: replay them where it is unsharded again.
        A graph of whole steps, collectives included, needs no setting, since its memory is its own: capture it behind
        three eager steps and with `.grad` None, without `set_reshard_after_backward(False)`, which may leave the
        gathers out, and leave the optimizer's `zero_grad` out of the loop that replays. Where a rank holds whole
        parameters, in the dtype in which they compute, pointers stay valid anyway.
        """
        check_bool("keep", keep)
        for state in _states(self, recurse):
            state.group.keep_storage(keep)

    def _get_fsdp_state(self) -> FSDPState:
        return require_state(self)


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Let several roots (the stages of a pipeline on one rank, say) count as one in what bounds reductions in flight.

    Reductions under way in any of them go on. An empty list, or one root, shares with none.

    Raises:
        ValueError: one is not a module that fully_shard was applied to.
    """
    states = _states_of("modules", modules)
    for state in states[1:]:
        state.context.share_reductions(states[0].context)


@cache
def public_methods() -> frozenset[str]:
    """Names that fully_shard adds to a module."""
    return frozenset(name for part in (FSDPModule, RootMethods) for name in vars(part) if not name.startswith("_"))


def _states_of(name: str, modules: Any) -> list[FSDPState]:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"{name}: expected modules that fully_shard was applied to, got {type(module).__name__}")
    return [state for module in modules for state in states_of(module)]


def _states(module: Any, recurse: bool) -> Iterator[FSDPState]:
    check_bool("recurse", recurse)
    return states_below(module) if recurse else states_of(module)
