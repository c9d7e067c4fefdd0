"""Runs a sharded model and a plain one on the same batch, and restores both."""

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

from ..shards.protocol import ShardGroup, Shards
from ..shards.tensors import map_tensors, tensors_in
from .audit import Held
from .difference import Distance, measure


def named_tensors(module: nn.Module, duplicates: bool = False) -> dict[str, Tensor]:
    """Returns parameters and buffers by FQN: under all names of each (`duplicates`), or under its first."""
    parameters = module.named_parameters(remove_duplicate=not duplicates)
    return {**dict(parameters), **dict(module.named_buffers(remove_duplicate=not duplicates))}


@dataclass
class Run:
    """Holds the results of one forward and backward.

    `outputs`: FQN and outputs of each sharded module, in the order in which the modules ran.
    `gradients`: by FQN, in the order in which autograd computed them; then None for parameters without one.
    `is_random`: True if the forward has used random numbers.
    """

    outputs: list[tuple[str, list[Tensor]]] = field(default_factory=list)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    loss: Tensor = field(default_factory=lambda: torch.zeros((), device="cpu"))
    is_random: bool = False


class Sides:
    """Holds the two models, and runs them on the whole batch, or on this rank's rows."""

    def __init__(
        self,
        reference: nn.Module,
        model: nn.Module,
        shards: Shards,
        tensors: Sequence[Held],
        batch: tuple[Any, ...],
        loss_fn: Callable[..., Tensor],
        ranks: list[int],
        rtol: float | None,
    ) -> None:
        self.reference, self.model, self.shards, self.tensors = reference, model, shards, tensors
        self.groups = groups = shards.groups
        self.batch, self.loss_fn, self.num_ranks = batch, loss_fn, len(ranks)
        self.rank = ranks.index(dist.get_rank())
        names = {module: name for name, module in model.named_modules()}
        # FQN of each sharded module -> its group.
        self.sharded: dict[str, ShardGroup] = {
            names[module]: group for group in reversed(groups) for module in group.modules if module in names
        }
        self.group_names = {param: group.name for group in groups for param in group.params}
        self.whole_tensors = named_tensors(reference, duplicates=True)
        self.dtype = max(self._dtypes(), key=lambda dtype: torch.finfo(dtype).eps)
        self.rtol = math.sqrt(torch.finfo(self.dtype).eps) if rtol is None else rtol
        # How many unsharded weights that modules computed with were compared with those of the reference; and those
        # that differ, with their place among them.
        self.num_gathered = 0
        self.gathered: list[tuple[int, Held, Distance]] = []
        self._ours: Run | None = None

    def _dtypes(self) -> Iterator[torch.dtype]:
        for group in self.groups:
            facts = group.facts()
            found = {*group.find_computed(), *(facts.reduced or ()), *(facts.sent or ())}
            yield from (dtype for dtype in found if dtype.is_floating_point)
        yield from (t.dtype for t in self.reference.parameters() if t.is_floating_point())

    @property
    def rows(self) -> tuple[Any, ...]:
        """This rank's rows of the batch."""
        rows: tuple[Any, ...] = map_tensors(self.batch, lambda t: t.chunk(self.num_ranks)[self.rank] if t.dim() else t)
        return rows

    def rows_like(self, whole: Tensor, part: Tensor) -> Tensor | None:
        """Returns this rank's chunk of an output of the reference; None if `part` is no chunk of it along one dim."""
        uneven = [d for d, (one, two) in enumerate(zip(whole.shape, part.shape, strict=False)) if one != two]
        if self.num_ranks == 1:
            return whole
        if whole.dim() != part.dim() or len(uneven) != 1:
            return None  # a mean over rows, for example
        dim = uneven[0]
        is_cut = whole.shape[dim] == self.num_ranks * part.shape[dim]
        return whole.chunk(self.num_ranks, dim)[self.rank] if is_cut else None

    @property
    def ours(self) -> Run:
        """The run of the sharded model on this rank's rows."""
        if self._ours is None:  # a cached_property would hold a lock, for which other ranks that are threads would wait
            self._ours = self._run_ours()
        return self._ours

    def _run_ours(self) -> Run:
        with ExitStack() as handles:
            for name in self.sharded:
                module = self.model.get_submodule(name)
                # Before the hook by which torch's FSDP2 reshards.
                handles.callback(module.register_forward_hook(self._compare_unsharded, prepend=True).remove)
            run = self._run(self.model, self.rows)
        self.shards.finish_gradients()
        run.gradients = {held.name: held.tensor.grad for held in self.tensors}
        return run

    @cached_property
    def whole(self) -> Run:
        """The run of the reference on the whole batch."""
        return self._run_reference(self.batch)

    @cached_property
    def own_rows(self) -> Run:
        """The run of the reference on this rank's rows."""
        return self._run_reference(self.rows)

    @cached_property
    def rounded(self) -> Run | None:
        """The run of the reference with inputs rounded as the policies cast them, or None if they cast none."""
        if all(group.input_dtype is None for group in self.sharded.values()):
            return None
        with ExitStack() as handles:
            for name, group in self.sharded.items():
                if group.input_dtype is not None:
                    module, cast = self.reference.get_submodule(name), partial(_round_inputs, group.input_dtype)
                    handles.callback(module.register_forward_pre_hook(cast, with_kwargs=True).remove)
            return self._run_reference(self.batch)

    def _run_reference(self, batch: tuple[Any, ...]) -> Run:
        order: list[str] = []
        named = [(name, p) for name, p in self.reference.named_parameters() if p.requires_grad]
        with ExitStack() as handles:
            for name, p in named:
                handles.callback(p.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name)).remove)
            run = self._run(self.reference, batch)
        gradients = {name: p.grad for name, p in named}
        run.gradients = {name: gradients[name] for name in [*order, *gradients]}
        for parameter in self.reference.parameters():
            parameter.grad = None
        return run

    def _run(self, module: nn.Module, batch: tuple[Any, ...]) -> Run:
        run = Run()

        def note(name: str, _: nn.Module, __: Any, output: Any) -> None:
            run.outputs.append((name, [t.detach().clone() for t in tensors_in(output) if t.is_floating_point()]))

        device = self.groups[0].ranks.device
        others = [] if device.type == "cpu" else [device]
        # Without devices the type doesn't matter, but torch refuses "cpu".
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
    def _compare_unsharded(self, module: nn.Module, *_: Any) -> None:
        """Compares the unsharded weights of a sharded module, whose forward has just run, with the reference."""
        used = {param for group in self.groups if module in group.modules for param in group.params}
        for held in self.tensors:
            param = held.param
            if param is None or param not in used or param.gathers_itself:
                continue
            owner, name = param.slots[0]
            unsharded = owner._parameters.get(name)
            if unsharded is not None and not isinstance(unsharded, DTensor):
                distance = measure(unsharded, self.whole_tensors[held.name].to(unsharded.dtype))
                self.num_gathered += 1
                if distance.relative:
                    self.gathered.append((self.num_gathered, held, distance))


def ties(module: nn.Module) -> dict[str, list[str]]:
    """Returns all FQNs of a parameter by each of its FQNs."""
    names: dict[Tensor, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return {name: several for several in names.values() for name in several}


def _random_states(devices: Sequence[torch.device]) -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.get_device_module(device).get_rng_state(device) for device in devices)]


def _round_inputs(dtype: torch.dtype, _: nn.Module, args: Any, kwargs: Any) -> Any:
    return map_tensors((args, kwargs), lambda t: t.to(dtype).to(t.dtype) if t.is_floating_point() else t)


def mean_loss(module: nn.Module, *batch: Any) -> Tensor:
    """Returns the mean of the scalars that the module returns, or else the sum of the mean squares of its outputs."""
    outputs = [tensor for tensor in tensors_in(module(*batch)) if tensor.grad_fn is not None]
    scalars = [tensor for tensor in outputs if tensor.dim() == 0]
    wide = [tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in outputs]
    return torch.stack(scalars).mean() if scalars else torch.stack([t.square().mean() for t in wide]).sum()


@contextmanager
def restored(reference: nn.Module, tensors: Sequence[Held], shards: Shards) -> Iterator[None]:
    """Context: parameters have no gradients inside. It restores gradients and buffers afterwards."""
    parameters = [*reference.parameters(), *(held.tensor for held in tensors if held.kind != "buffer")]
    gradients = [parameter.grad for parameter in parameters]
    buffers = [*reference.buffers(), *(held.tensor for held in tensors if held.kind == "buffer")]
    values = [buffer.detach().clone() for buffer in buffers]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    except BaseException:
        shards.drop(after_error=True)
        raise
    finally:
        shards.drop(after_error=False)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, value in zip(buffers, values, strict=True):
                buffer.copy_(value)
