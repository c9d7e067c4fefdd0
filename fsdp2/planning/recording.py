"""Records one forward and backward of the plain model without computing it: bytes, operations and module calls.

The model runs in torch's FakeTensorMode, on tensors that have no memory. A dispatch mode counts the storages that
operations make until they are freed. What it notes between two marks (a module is called, a gradient is complete) is
later played with each setting's unsharded parameters and gradients around it (playback.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..calls.nested import map_tensors, tensors_in
from ..engine.step import cast_floating
from ..torch_private.plans import fake_mode, flop_formulas, is_fake, run_backward
from .kernels import of_device
from .meter import StorageMeter
from .structure import PlannedGroup, compute_dtypes, modules_of

if TYPE_CHECKING:
    from ..torch_private.plans import FakeTensorMode

# Kinds of marks. `subject` is the index of a group's module in the outline, or of a parameter for GRADIENT.
BEGIN, END, REACHED, INPUTS, GRADIENT = "begin", "end", "reached", "inputs", "gradient"


class Mark(NamedTuple):
    """One moment of a recording, and what was computed since the mark before it.

    Args:
        kind: BEGIN or END of a module's forward, REACHED: backward comes to its outputs, INPUTS: the gradients of its
            inputs are computed, GRADIENT: that of a parameter is.
        subject: index of the module, or of the parameter.
        peak: most bytes alive since the mark before, in activations and gradients that are not complete.
        live: such bytes at this moment. A gradient that is complete counts in `peak` only.
        flops: floating-point operations since the mark before.
        call: of a module, which of its calls in the forward it is about, from 0 on.
        has_grad: of BEGIN: grad is enabled.
        flag: of END: outputs have a gradient to come. Of BEGIN: the forward runs again, in backward.
    """

    kind: str
    subject: int
    peak: int
    live: int
    flops: int
    flag: bool = False
    call: int = 0
    has_grad: bool = True


@dataclass
class Recording:
    """The marks of one step. `last_peak` and `last_flops` are what was computed after the last mark."""

    marks: list[Mark] = field(default_factory=list)
    last_peak: int = 0
    last_flops: int = 0


class _Counter(StorageMeter):
    """Counts bytes of living storages that operations have made since `is_on`, and floating-point operations."""

    def __init__(self) -> None:
        super().__init__()
        self._formulas = flop_formulas()
        self.flops, self.is_on = 0, False

    def count(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Counts what an operation has computed."""
        if not self.is_on:
            return
        formula = self._formulas.get(func.overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=out)
        self.see(out)


def record(
    model: nn.Module,
    groups: Sequence[PlannedGroup],
    batch: Callable[[], Any],
    loss: Callable[[Any], Tensor],
    checkpointed: Iterable[nn.Module] = (),
    device: str = "cpu",
) -> Recording:
    """Returns a recording of one forward and backward of `model`. It leaves the model as it was.

    The output of the model stays alive until backward ends, as in `output = model(batch); loss_of(output).backward()`.

    Args:
        model: any module, also on meta.
        groups: of which it notes the modules, and the parameters.
        batch: makes the arguments of the model: a tensor, a tuple or list of arguments, or a dict of named ones.
        loss: computes a scalar of what the model returns.
        checkpointed: modules whose forward runs again in backward.
        device: the type of device that will train. Its kernels say which tensors stay for backward.
    """
    counter, marks = _Counter(), Recording()
    arguments = batch()
    with ExitStack() as stack, torch.enable_grad():
        mode = fake_mode(counter.count)
        parameters = stack.enter_context(_on_fakes(model, mode, compute_dtypes(groups)))
        args, kwargs = _as_call(_to_fake(arguments, mode))
        counter.leave_out(tensors_in(args, kwargs))
        counter.leave_out(parameters)
        counter.leave_out(model.buffers())
        hooks = _Hooks(counter, marks)
        for i, module, group in modules_of(groups):
            stack.enter_context(hooks.on_module(module, i, *group.casts))
        for module in checkpointed:
            again = partial(checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False)
            stack.enter_context(_forward_as(module, again))
        for i, parameter in enumerate(parameters):
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(hooks.gradient, i))
        stack.enter_context(mode)
        stack.enter_context(of_device(device))
        counter.is_on = True
        output = model(*args, **kwargs)
        result = loss(output)
        if not isinstance(result, Tensor) or result.numel() != 1:
            raise TypeError(f"loss: expected a function that returns a scalar tensor, got {type(result).__name__}")
        hooks.in_backward = True
        run_backward(result)
        del output, result, args, kwargs
        marks.last_peak, marks.last_flops = counter.peak, counter.flops
    return marks


class _Hooks:
    """Notes marks when modules are called, when backward comes to them, and when gradients are complete."""

    def __init__(self, counter: _Counter, recording: Recording) -> None:
        self._counter, self._marks = counter, recording.marks
        self.in_backward = False
        # How often each module has been called.
        self._calls: Counter[int] = Counter()

    def mark(self, kind: str, subject: int, flag: bool = False, call: int = 0) -> None:
        counter, has_grad = self._counter, torch.is_grad_enabled()
        numbers = counter.peak, counter.live, counter.flops
        self._marks.append(Mark(kind, subject, *numbers, flag, call, has_grad))
        counter.peak, counter.flops = counter.live, 0

    def gradient(self, i: int, parameter: Tensor) -> None:
        parameter.grad = None
        self.mark(GRADIENT, i)

    @contextmanager
    def on_module(self, module: nn.Module, i: int, into: torch.dtype | None, out: torch.dtype | None) -> Iterator[None]:
        begun: list[int] = []  # calls that run, the innermost last

        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if into is not None:
                args, kwargs = cast_floating(args, into), cast_floating(kwargs, into)
            inputs = [t for t in tensors_in(args, kwargs) if t.grad_fn is not None]
            call = self._calls[i]
            self.mark(BEGIN, i, self.in_backward, call)
            if not self.in_backward:
                self._calls[i] += 1
                begun.append(call)
                if inputs:
                    torch.autograd.graph.register_multi_grad_hook(inputs, lambda _: self.mark(INPUTS, i, call=call))
            return args, kwargs

        def after(module: nn.Module, args: Any, output: Any) -> Any:
            nodes = dict.fromkeys(t.grad_fn for t in tensors_in(output) if t.grad_fn is not None)
            call = 0 if self.in_backward else begun.pop()
            if not self.in_backward:
                for node in nodes:
                    node.register_prehook(lambda _: self.mark(REACHED, i, call=call))
            self.mark(END, i, bool(nodes) and not self.in_backward, call)
            return cast_floating(output, out) if out is not None else output

        handles = [module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


@contextmanager
def _forward_as(module: nn.Module, other: Callable[..., Any]) -> Iterator[None]:
    had, forward = "forward" in module.__dict__, module.forward
    module.forward = other
    try:
        yield
    finally:
        if had:
            module.forward = forward
        else:
            del module.__dict__["forward"]


@contextmanager
def _on_fakes(
    model: nn.Module, mode: FakeTensorMode, compute_dtypes: dict[Tensor, torch.dtype]
) -> Iterator[list[Tensor]]:
    """Puts tensors without memory, on the CPU, in place of all that the modules have. Yields the new parameters, in the
    order of `compute_dtypes`.
    """
    fakes: dict[Tensor, Tensor] = {}
    places: list[tuple[nn.Module, dict[str, Any], str, Tensor]] = []
    for module in model.modules():
        dicts: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, module.__dict__)
        for slots in dicts:
            places += [(module, slots, name, value) for name, value in slots.items() if isinstance(value, Tensor)]
    for parameter, dtype in compute_dtypes.items():
        fakes[parameter] = nn.Parameter(_fake_like(parameter, mode, dtype), parameter.requires_grad)
    for _, _, _, tensor in places:
        if tensor not in fakes:
            fakes[tensor] = _fake_like(tensor, mode, tensor.dtype)
    try:
        for module, slots, name, tensor in places:
            _put(module, slots, name, fakes[tensor])
        yield [fakes[parameter] for parameter in compute_dtypes]
    finally:
        for module, slots, name, tensor in places:
            _put(module, slots, name, tensor)
        read = [p for p in compute_dtypes if p.grad is not None and is_fake(p.grad)]
        for parameter in read:
            parameter.grad = None
    if read:
        raise RuntimeError(f"the forward reads {len(read)} parameters otherwise than from where they are registered")


def _put(module: nn.Module, slots: dict[str, Any], name: str, tensor: Tensor) -> None:
    if slots is module._parameters and type(module).__setattr__ is not nn.Module.__setattr__:
        setattr(module, name, tensor)  # nn.LSTM keeps a list besides
    else:
        slots[name] = tensor


def _fake_like(tensor: Tensor, mode: FakeTensorMode, dtype: torch.dtype) -> Tensor:
    with mode:
        return torch.empty(tuple(tensor.shape), dtype=dtype, device="cpu")


def _to_fake(value: Any, mode: FakeTensorMode) -> Any:
    def convert(tensor: Tensor) -> Tensor:
        if is_fake(tensor):
            raise TypeError("batch: expected real tensors, or tensors on meta")
        fake = _fake_like(tensor, mode, tensor.dtype)
        return fake.requires_grad_(tensor.requires_grad) if tensor.is_floating_point() else fake

    return map_tensors(value, convert)


def _as_call(value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(value, dict):
        return (), value
    return (tuple(value), {}) if isinstance(value, (tuple, list)) else ((value,), {})


def without_activations(model: nn.Module, groups: Sequence[PlannedGroup]) -> Recording:
    """Returns a recording of a model that computes nothing: modules run in the order in which they are registered, and
    only complete gradients take memory.
    """
    dtypes = compute_dtypes(groups)
    parameters = [*dtypes]
    nbytes = [p.numel() * dtype.itemsize for p, dtype in dtypes.items()]
    recording, indices = Recording(), {module: i for i, module, _ in modules_of(groups)}
    numbers = {parameter: i for i, parameter in enumerate(parameters)}
    backward: list[list[Mark]] = []
    seen: set[nn.Module] = set()

    def visit(module: nn.Module) -> None:
        if module in seen:
            return
        seen.add(module)
        i = indices.get(module)
        gradients = [numbers.pop(p) for p in module._parameters.values() if p in numbers]
        marks = [Mark(GRADIENT, n, nbytes[n], 0, 0) for n in reversed(gradients) if parameters[n].requires_grad]
        if i is not None:
            recording.marks.append(Mark(BEGIN, i, 0, 0, 0))
        backward.append(marks)
        for child in module.children():
            visit(child)
        if i is not None:
            recording.marks.append(Mark(END, i, 0, 0, 0, True))
            backward.append([Mark(REACHED, i, 0, 0, 0)])

    visit(model)
    recording.marks += [mark for marks in reversed(backward) for mark in marks]
    return recording
