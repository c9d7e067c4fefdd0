"""Has all ranks leave out a step that one of them can't go on with: out of memory, a bad sample (`skip_step_on_error`).

A rank that raises says goodbye on every process group of the model, in place of the next collective's header
(checks/named_comm.py). The others find that where they would communicate next, at the end of the block at the latest,
where all ranks compare. They raise, and say goodbye themselves. So all ranks leave the block, whatever each was doing,
and nothing is in flight. Then they tell each other why.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..calls.user_code import hides_modes
from ..collectives import choose as collectives
from ..collectives.choose import make_comm
from ..collectives.watching import compare_first
from ..engine.comm import CommLabel
from ..engine.root import Root
from ..engine.state import modules_below, require_root
from ..ranks.rank_facts import gather_by_rank, ranks_of
from ..torch_private.internals import backend_name, no_torch_function
from ..torch_private.rare_internals import has_backend
from .blocks import BlockWatch, watch_of
from .conditional import is_conditional
from .optimizer_in_backward import steps_of
from .passes import finalize, reset
from .vocab_parallel import refuse_rows

Kinds = type[BaseException] | tuple[type[BaseException], ...]
_CPU = torch.device("cpu")
_FINISHING = "finishing"


def skip_step_on_error(model: nn.Module, catch: Kinds = torch.OutOfMemoryError) -> SkippableStep:
    """Returns a context for the forward and backward passes of one optimizer step, which all ranks finish or skip.

    If a rank raises an exception of a kind in `catch`, the block ends on all ranks without an error, and `skipped` is
    True on all of them: no parameter has a gradient, and buffers are as they were before the block. If it raises
    another one, all ranks raise: that one on its rank, a RuntimeError that names the rank on the others. So no rank
    waits for one that has left. Step behind the block, if it was not skipped. Every rank must enter the block.

    What is caught: exceptions of the program in forward, loss and backward, of hooks, of the code that makes the
    batch, of checks, and of allocators, between collectives of the model. What is not: an exception while other ranks
    wait in a collective that is not the model's (`dist.all_reduce`, the norm of gradients, SyncBatchNorm), where they
    stay until its timeout: clip and log behind the block; a process that ends, which gives the others an error, as
    without this; and an error of a device that ends its context. Random states are not restored.

    Costs: buffers are copied at the beginning, and ranks exchange one small message at the end. On gloo that is all. On
    other backends ranks compare before each collective of the model, from the first block on (`set_checks`);
    the process group needs gloo for the CPU, too: `init_process_group("cpu:gloo,cuda:nccl")`.

    Args:
        model: the outermost sharded module. It may replicate, also with HSDP, offload to the CPU, accumulate.
        catch: the class of exceptions that are skipped, or several. If all ranks raise alike in each step, all are
            skipped: name no class that a mistake in the program raises, or count `skipped`.

    Returns:
        A `SkippableStep`.

    Raises:
        TypeError: `catch` is neither a class of exceptions nor a tuple of such.
        RuntimeError: `model` is not the outermost sharded module. When the block begins: a forward, a backward or
            another block runs; a parameter has a gradient; the optimizer steps in backward; or there is no gloo.
        NotImplementedError: the model has conditional modules, groups on different ranks, or a mesh with further axes.

    Example:
        ```python
        with fsdp2.skip_step_on_error(model, catch=(torch.OutOfMemoryError, BadSample)) as step:
            loss_of(model, next(batches)).backward()
        if step.skipped:
            print(step.reasons)  # {3: "OutOfMemoryError: CUDA out of memory. ..."}
        else:
            optimizer.step()
            optimizer.zero_grad()
        ```
    """
    kinds = catch if isinstance(catch, tuple) else (catch,)
    if not kinds or not all(isinstance(kind, type) and issubclass(kind, BaseException) for kind in kinds):
        raise TypeError(f"catch: expected a class of exceptions or a tuple of such, got {catch!r}")
    return SkippableStep(require_root(model, "skip_step_on_error"), kinds)


class SkippableStep:
    """One step that all ranks finish or skip, which `skip_step_on_error` returns. Enter it once, by `with`."""

    def __init__(self, root: Root, kinds: tuple[type[BaseException], ...]) -> None:
        self._root, self._kinds = root, kinds
        self._watch: SkipWatch | None = None
        self._buffers: list[_Saved] = []
        self._was_entered = False
        self._reasons: dict[int, str] | None = None
        self._comm_label = CommLabel("the end of a step", root)

    @property
    def skipped(self) -> bool:
        """True if all ranks have skipped the step. It is the same on all ranks.

        Raises:
            RuntimeError: the block has not ended, or has ended by an exception.
        """
        return bool(self.reasons)

    @property
    def reasons(self) -> dict[int, str]:
        """The ranks that have raised, and what each has: none if the step was not skipped. The same on all ranks.

        Raises:
            RuntimeError: the block has not ended, or has ended by an exception.
        """
        if self._reasons is None:
            raise RuntimeError("skipped and reasons are known when the block of skip_step_on_error has ended")
        return self._reasons

    @hides_modes
    def __enter__(self) -> SkippableStep:
        if self._was_entered:
            raise RuntimeError(
                "skip_step_on_error: a block is entered once. Call fsdp2.skip_step_on_error(model) for each step."
            )
        root, watch = self._root, watch_of(self._root, SkipWatch)
        _refuse(root, watch)
        _compare_before_collectives(root)
        self._buffers = [
            _Saved(module, name, buffer, buffer.detach().clone())
            for module in _modules_of(root)
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._was_entered, self._watch, watch.active, watch.is_told = True, watch, self, False
        return self

    @hides_modes
    def __exit__(self, kind: type[BaseException] | None, error: Any, traceback: TracebackType | None) -> bool:
        watch, self._watch = self._watch, None
        assert watch is not None, "it was entered"
        watch.active = None
        try:
            return self._end(watch, error)
        finally:
            self._buffers.clear()

    def _end(self, watch: SkipWatch, error: BaseException | None) -> bool:
        """Returns True if the step is skipped, and `error` with it."""
        root = self._root
        if error is None:
            error = self._compare_at_end()
            if error is None:
                self._reasons = {}
                return False
        is_own = not watch.is_told  # else another rank has left before
        if is_own:
            root.note_out_of_step()
        self._drop()
        if not isinstance(error, Exception):
            raise error  # the user interrupts the program
        own = f"{type(error).__name__}: {error}", isinstance(error, self._kinds)
        told = gather_by_rank(own if is_own else None, root.group.mesh.axis_groups, _CPU)
        reasons = {rank: each for rank, each in told.items() if each is not None}
        if not reasons:
            raise error  # ranks have run different sequences
        others = [f"rank {rank}: {text}" for rank, (text, is_caught) in reasons.items() if not is_caught]
        if others and is_own and not own[1]:
            raise error
        if others:
            raise RuntimeError(
                f"skip_step_on_error: a rank has left the step by an error: {'; '.join(others)}"
            ) from None
        self._reasons = {rank: text for rank, (text, _) in reasons.items()}
        return True

    def _compare_at_end(self) -> RuntimeError | None:
        """Returns None when all ranks have come to the end of their blocks, else the error that says who has not."""
        nothing = torch.empty(0, device=_CPU)
        try:
            for group in self._root.group.mesh.axis_groups:
                compare_first(make_comm(group, _CPU, self._comm_label), _FINISHING, nothing)  # a simulated one does not
        except RuntimeError as error:
            return error
        return None

    def _drop(self) -> None:
        """Drops the gradients of the block, and gives buffers what they had."""
        reset(self._root)
        for module in _modules_of(self._root):
            for param in module._parameters.values():
                if param is not None:
                    param.grad = None
        with torch.no_grad(), no_torch_function():
            for module, name, buffer, value in self._buffers:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
                module._buffers[name] = buffer


class _Saved(NamedTuple):
    module: nn.Module
    name: str
    buffer: Tensor
    value: Tensor


def _modules_of(root: Root) -> list[nn.Module]:
    return list(dict.fromkeys(each for module in root.state.modules for each in modules_below(module)))


# ---- what is refused, and what a block needs


def _refuse(root: Root, watch: SkipWatch) -> None:
    """Raises RuntimeError or NotImplementedError if a block can't begin now. Ranks have the same settings."""
    if watch.active is not None:
        raise RuntimeError(
            "skip_step_on_error: the model is in another block of skip_step_on_error. Leave that one first."
        )
    if root.running or root.is_in_backward():
        raise RuntimeError("skip_step_on_error: expected a call between steps, got one during a forward or backward")
    refuse_rows(root, "skip_step_on_error", "these messages can't say that a rank has left the step.")
    finalize(root)
    conditional = next((state for state in root.states if is_conditional(state)), None)
    if conditional is not None:
        raise NotImplementedError(
            f"skip_step_on_error: {conditional} is conditional, and ranks that reach consensus before each collective "
            "can't say that one has left the step. Run that module on every rank, on inputs of zeros where a rank has "
            "none, and leave conditional=True out."
        )
    mesh = root.group.mesh
    if any(mesh.mesh.size(axis) > 1 for axis in {*range(mesh.mesh.ndim)} - {*mesh.shard_axes, *mesh.replicate_axes}):
        raise NotImplementedError(
            f"skip_step_on_error: expected a mesh whose ranks share parameters along each axis, got {mesh.topology}. "
            "Ranks along the other axes communicate in ways that can't be left."
        )
    for group in root.groups:
        if group.mesh is not mesh and ranks_of(group.mesh) != ranks_of(mesh):
            raise NotImplementedError(f"skip_step_on_error: {group} is on other ranks than {root.state}")
        if steps_of(group) is not None:
            raise RuntimeError(
                "skip_step_on_error: the optimizer steps in backward, which can't be taken back. Call "
                "set_optimizer_in_backward(None), and step behind the block."
            )
    with no_torch_function():
        for module in _modules_of(root):
            for name, param in module._parameters.items():
                if param is not None and param.grad is not None:
                    raise RuntimeError(
                        f"skip_step_on_error: parameter {name} of a {type(module).__name__} has a gradient. Call "
                        "optimizer.zero_grad() before the block: all micro-batches of a step belong inside."
                    )


def _compare_before_collectives(root: Root) -> None:
    """Has ranks compare before each collective, where these carry no headers.

    Raises:
        RuntimeError: there is no gloo by which they can.
    """
    connected = [comm for group in root.groups for comm in group.comms if comm is not None and comm.size > 1]
    if all(hasattr(comm, "compare") for comm in connected):
        return
    for comm in connected:
        process_group = comm.group
        assert process_group is not None, "it connects ranks"
        kind = root.group.mesh.device.type
        if not has_backend(process_group, _CPU) or backend_name(process_group, _CPU) != "gloo":
            raise RuntimeError(
                "skip_step_on_error: ranks tell each other by gloo on the CPU, which the process group lacks. "
                f'Initialise it with both: init_process_group("cpu:gloo,{kind}:...").'
            )
    for group in root.groups:
        collectives.choose(group, checked=True)


class SkipWatch(BlockWatch):
    """Follows the block of a root that has been entered (`active`), and if ranks were out of step since (`is_told`)."""

    refusal = (
        "it is inside of a block of skip_step_on_error, and can't be taken back. "
        "Step behind the block, if it was not skipped."
    )

    def __init__(self) -> None:
        super().__init__()
        self.is_told = False

    def out_of_step(self, root: Root) -> None:
        self.is_told = self.is_told or not root.has_failed
