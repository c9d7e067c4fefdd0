"""A sharded model and a plain one run on the same batch, and are left as they were."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..core.state import FSDPState
from ..core.user_code import map_tensors, tensors_in
from .audit import Held
from .difference import Distance, measure


def named_tensors(module: nn.Module, duplicates: bool = False) -> dict[str, Tensor]:
    """Parameters and buffers by FQN, under all names of each or the first."""
    parameters = module.named_parameters(remove_duplicate=not duplicates)
    return {**dict(parameters), **dict(module.named_buffers(remove_duplicate=not duplicates))}


@dataclass
class Run:
    """What one forward and backward has shown.

    `outputs`: of each sharded module, in the order in which they ran.
    `gradients`: in the order in which they came, then those that have none.
    """

    outputs: list[tuple[str, list[Tensor]]] = field(default_factory=list)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    loss: Tensor = field(default_factory=lambda: torch.zeros((), device="cpu"))
    is_random: bool = False


class Sides:
    """The two models, and what they show in all the ways of running them that are asked for."""

    def __init__(
        self,
        reference: nn.Module,
        model: nn.Module,
        states: Sequence[FSDPState],
        tensors: Sequence[Held],
        batch: tuple[Any, ...],
        loss_fn: Callable[..., Tensor],
        ranks: list[int],
        rtol: float | None,
    ) -> None:
        self.reference, self.model, self.states, self.tensors = reference, model, states, tensors
        self.batch, self.loss_fn, self.num_ranks = batch, loss_fn, len(ranks)
        self.place = ranks.index(dist.get_rank())
        names = {module: name for name, module in model.named_modules()}
        # FQN of each sharded module -> its outer state.
        self.sharded = {names[m]: state for state in reversed(states) for m in state.modules if m in names}
        self.groups = {param: state.group.name for state in states for param in state.group.params}
        self.whole_tensors = named_tensors(reference, duplicates=True)
        self.dtype = max(self._dtypes(), key=lambda dtype: torch.finfo(dtype).eps)
        self.rtol = math.sqrt(torch.finfo(self.dtype).eps) if rtol is None else rtol
        # Weights that modules computed with, and that aren't what the reference has.
        self.gathered: list[tuple[Held, Distance]] = []
        self._ours: Run | None = None

    def _dtypes(self) -> Iterator[torch.dtype]:
        for state in self.states:
            for param in state.group.params:
                stored, policy = param.local.dtype, state.policy
                if stored.is_floating_point:
                    yield from (param.compute_dtype(policy), policy.gradient_dtype(stored), policy.sent_dtype(stored))
        yield from (t.dtype for t in self.reference.parameters() if t.is_floating_point())

    @property
    def rows(self) -> tuple[Any, ...]:
        """This rank's."""
        return map_tensors(self.batch, lambda t: t.chunk(self.num_ranks)[self.place] if t.dim() else t)

    def rows_like(self, whole: Tensor, part: Tensor) -> Tensor | None:
        """This rank's part of what the reference returned, if that is cut along one dim as `part` is."""
        uneven = [d for d, (one, two) in enumerate(zip(whole.shape, part.shape, strict=False)) if one != two]
        if self.num_ranks == 1:
            return whole
        if whole.dim() != part.dim() or len(uneven) != 1:
            return None  # a mean over rows, say
        dim = uneven[0]
        is_cut = whole.shape[dim] == self.num_ranks * part.shape[dim]
        return whole.chunk(self.num_ranks, dim)[self.place] if is_cut else None

    @property
    def ours(self) -> Run:
        if self._ours is None:  # a cached_property would hold a lock, for which ranks that are threads wait
            self._ours = self._run_ours()
        return self._ours

    def _run_ours(self) -> Run:
        with ExitStack() as handles:
            for name in self.sharded:
                module = self.model.get_submodule(name)
                handles.callback(module.register_forward_hook(self._look_at_gathered).remove)
            run = self._run(self.model, self.rows)
        for context in dict.fromkeys(state.context for state in self.states):
            context.finalize()
        run.gradients = {held.name: held.tensor.grad for held in self.tensors}
        return run

    @cached_property
    def whole(self) -> Run:
        return self._run_reference(self.batch)

    @cached_property
    def own_rows(self) -> Run:
        """The reference on what this rank sees."""
        return self._run_reference(self.rows)

    @cached_property
    def rounded(self) -> Run | None:
        """The reference with inputs rounded as the policies cast them; None: they cast none."""
        if all(state.input_dtype is None for state in self.sharded.values()):
            return None
        with ExitStack() as handles:
            for name, state in self.sharded.items():
                if state.input_dtype is not None:
                    module, cast = self.reference.get_submodule(name), partial(_round_inputs, state.input_dtype)
                    handles.callback(module.register_forward_pre_hook(cast, with_kwargs=True).remove)
            return self._run_reference(self.batch)

    def _run_reference(self, batch: tuple[Any, ...]) -> Run:
        came: list[str] = []
        named = [(name, p) for name, p in self.reference.named_parameters() if p.requires_grad]
        with ExitStack() as handles:
            for name, p in named:
                handles.callback(p.register_post_accumulate_grad_hook(lambda _, name=name: came.append(name)).remove)
            run = self._run(self.reference, batch)
        gradients = {name: p.grad for name, p in named}
        run.gradients = {name: gradients[name] for name in [*came, *gradients]}
        for parameter in self.reference.parameters():
            parameter.grad = None
        return run

    def _run(self, module: nn.Module, batch: tuple[Any, ...]) -> Run:
        run = Run()

        def note(name: str, _: nn.Module, __: Any, output: Any) -> None:
            run.outputs.append((name, [t.detach().clone() for t in tensors_in(output) if t.is_floating_point()]))

        device = self.states[0].group.mesh.device
        others = [] if device.type == "cpu" else [device]
        # Without devices it doesn't matter of what type they are, but "cpu" is refused.
        kind = others[0].type if others else "cuda"
        with torch.random.fork_rng([other.index for other in others], device_type=kind), torch.enable_grad():
            before = _random_states(others)
            with ExitStack() as handles:  # until backward: checkpointing runs forwards again
                for name in self.sharded:
                    handles.callback(module.get_submodule(name).register_forward_hook(partial(note, name)).remove)
                loss = self.loss_fn(module, *batch)
            run.is_random = not all(map(torch.equal, before, _random_states(others)))
            loss.backward()
        run.loss = loss.detach()
        return run

    @torch.no_grad()
    def _look_at_gathered(self, module: nn.Module, *_: Any) -> None:
        used = {param for state in self.states if module in state.modules for param in state.group.params}
        for held in self.tensors:
            param = held.param
            if param is not None and param in used and not param.is_extended and not isinstance(param.full, DTensor):
                distance = measure(param.full, self.whole_tensors[held.name].to(param.full.dtype))
                if distance.relative:
                    self.gathered.append((held, distance))


def ties(module: nn.Module) -> dict[str, list[str]]:
    """FQN of each parameter -> all names of the same one."""
    names: dict[Tensor, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return {name: several for several in names.values() for name in several}


def _random_states(devices: Sequence[torch.device]) -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.get_device_module(device).get_rng_state(device) for device in devices)]


def _round_inputs(dtype: torch.dtype, _: nn.Module, args: Any, kwargs: Any) -> Any:
    return map_tensors((args, kwargs), lambda t: t.to(dtype).to(t.dtype) if t.is_floating_point() else t)


def mean_loss(module: nn.Module, *batch: Any) -> Tensor:
    outputs = [tensor for tensor in tensors_in(module(*batch)) if tensor.grad_fn is not None]
    scalars = [tensor for tensor in outputs if tensor.dim() == 0]
    wide = [tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in outputs]
    return torch.stack(scalars).mean() if scalars else torch.stack([t.square().mean() for t in wide]).sum()


@contextmanager
def restored(reference: nn.Module, tensors: Sequence[Held], states: Sequence[FSDPState]) -> Iterator[None]:
    """Without gradients inside; with those of before, and the buffers, afterwards."""
    parameters = [*reference.parameters(), *(held.tensor for held in tensors if held.kind != "buffer")]
    gradients = [parameter.grad for parameter in parameters]
    buffers = [*reference.buffers(), *(held.tensor for held in tensors if held.kind == "buffer")]
    values = [buffer.detach().clone() for buffer in buffers]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    except BaseException:
        for context in dict.fromkeys(state.context for state in states):
            context.reset()
        raise
    finally:
        for state in states:
            state.group.gradients.waiting.drop()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, value in zip(buffers, values, strict=True):
                buffer.copy_(value)
