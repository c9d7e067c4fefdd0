"""Averages of a sharded model's weights (EMA, SWA): one operation for all parameters that lie side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import swa_utils

from ..shards.find import before_write, shards_of
from ..shards.tensors import local_if_any
from .spans import Place, Places, Run


class AveragedModel(swa_utils.AveragedModel):
    """Is `torch.optim.swa_utils.AveragedModel`, which updates a sharded model's averages many parameters at a time.

    Build it from the sharded model: `module` is a copy, sharded alike, and an update communicates nothing. `avg_fn` and
    `multi_avg_fn` get flat tensors, each of several parameters; so they must compute element by element, as
    `get_ema_multi_avg_fn` and all others of torch do. The averages have the same bits as those of torch's class, and
    the state dict has the same names. Parameters that lie otherwise than their averages, and plain ones, are averaged
    one by one, and so are buffers.

        ema = fsdp2.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.999))
        ...
        optimizer.step()
        ema.update_parameters(model)

    Args:
        model, device, avg_fn, multi_avg_fn, use_buffers: those of torch's class.
        module: holds the averages in place of a copy: a module of the same names, sharded alike. It gets the values of
            `model` now. Modules of torch's FSDP2, which can't be copied, need one: build and shard it as `model`.

    Raises:
        ValueError: `module` has other parameters than `model`, or they are sharded otherwise.
        NotImplementedError: torch's FSDP2 has sharded `model`, and there is no `module`.
    """

    def __init__(
        self,
        model: nn.Module,
        device: int | torch.device | None = None,
        avg_fn: Callable[..., Any] | None = None,
        multi_avg_fn: Callable[..., Any] | None = None,
        use_buffers: bool = False,
        *,
        module: nn.Module | None = None,
    ) -> None:
        if module is None and any(group.is_foreign for group in shards_of(model).groups):
            raise NotImplementedError(
                "AveragedModel: modules of torch's FSDP2 can't be copied. Build another one, shard it alike, and pass "
                "it: fsdp2.AveragedModel(model, module=twin, ...)."
            )
        super().__init__(model if module is None else nn.Module(), device, avg_fn, multi_avg_fn, use_buffers)
        if module is not None:
            _copy_values(module, model)
            self.module = module

    def update_parameters(self, model: nn.Module) -> None:
        """Updates the averages by the weights that `model` has now. Every rank may call it by itself."""
        pairs = vars(self).get("_fsdp2_pairs")
        for group in () if pairs is None else pairs.foreign:
            group.settle()
        if pairs is None or not pairs.are_of(self.module, model):
            pairs = vars(self)["_fsdp2_pairs"] = _Pairs(self.module, model)
        if pairs.written:
            before_write()
        ours, theirs = (_Flat(*parts) for parts in zip(pairs.flat, pairs.members, strict=True))
        super(AveragedModel, _Update(self, ours)).update_parameters(theirs)  # type: ignore[arg-type]
        if pairs.written:
            increment_version(pairs.written)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_fsdp2_pairs"}


@torch.no_grad()
def _copy_values(target: nn.Module, source: nn.Module) -> None:
    """Copies parameters and buffers of `source` to `target`."""
    for each in (target, source):
        shards_of(each)  # torch's FSDP2 may have left some unsharded
    before_write()
    for kind in ("named_parameters", "named_buffers"):
        targets, sources = (dict(getattr(each, kind)()) for each in (target, source))
        if targets.keys() != sources.keys():
            raise ValueError(f"module: expected the names of the model, one lacks {sorted({*targets} ^ {*sources})}")
        for name, tensor in targets.items():
            own, other = local_if_any(tensor), local_if_any(sources[name])
            if own.shape != other.shape or type(tensor) is not type(sources[name]):
                raise ValueError(f"module: expected {name} sharded as in the model, {other.shape}, got {own.shape}")
            own.copy_(other)


class _Pairs:
    """Pairs parameters of two models. `flat`: what is averaged, and by what; `written`: sharded parameters in that;
    `foreign`: groups whose forwards may leave parameters unsharded.
    """

    def __init__(self, averaged: nn.Module, current: nn.Module) -> None:
        groups = [group for each in (averaged, current) for group in shards_of(each).groups]
        self.foreign = [group for group in groups if group.is_foreign]
        self.members = _Members(averaged), _Members(current)
        self._given = [members.parameters() for members in self.members]
        self._locals = [[*map(local_if_any, given)] for given in self._given]
        self.flat: tuple[list[Tensor], list[Tensor]] = ([], [])
        self.written: list[Tensor] = []
        places, found = Places(), []
        for pair in zip(*self._given, strict=True):
            here = [places.find(each) for each in pair]
            if None in here or not _are_alike(*here):  # type: ignore[arg-type]
                for flat, each in zip(self.flat, pair, strict=True):
                    flat.append(each)
            elif here[0].local.numel():  # type: ignore[union-attr]
                found.append(here)
        with torch.inference_mode(False), torch.no_grad():
            for run in _touching(found):  # type: ignore[arg-type]
                for flat, side in zip(self.flat, zip(*run, strict=True), strict=True):
                    flat.append(Run([*side]).view())
                self.written += [place.parameter for place, _ in run]

    def are_of(self, averaged: nn.Module, current: nn.Module) -> bool:
        """Returns True if it was made of these, whose parameters are the same, in the same memory."""
        for members, given, locals_, module in zip(
            self.members, self._given, self._locals, (averaged, current), strict=True
        ):
            if members.module is not module or not all(map(is_, given, members.parameters())):
                return False
            if not all(map(is_, locals_, map(local_if_any, given))):
                return False
        return True


class _Members:
    """Knows where the parameters of a module stand: to walk over all modules takes longer than to average.

    `module`: it has the same modules, and these the same names, as when this was made.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        found: dict[int, tuple[dict[str, Any], str]] = {}
        for each in module.modules():
            for name, value in each._parameters.items():
                if value is not None:
                    found.setdefault(id(value), (each._parameters, name))
        self._dicts, self._names = [each for each, _ in found.values()], [name for _, name in found.values()]

    def parameters(self) -> list[Any]:
        return [*map(dict.get, self._dicts, self._names)]


def _are_alike(one: Place, other: Place) -> bool:
    return one.local.shape == other.local.shape and one.local.dtype == other.local.dtype


def _touching(pairs: list[tuple[Place, Place]]) -> Iterator[list[tuple[Place, Place]]]:
    """Yields runs of pairs of which both sides lie side by side, without padding between."""
    run: list[tuple[Place, Place]] = []
    for pair in sorted(pairs, key=lambda pair: (id(pair[0].shards), pair[0].offset)):
        if run and not all(before.touches(after) for before, after in zip(run[-1], pair, strict=True)):
            yield run
            run = []
        run.append(pair)
    if run:
        yield run


class _Flat:
    """Stands for a model whose parameters are `tensors`, for torch's code."""

    def __init__(self, tensors: list[Tensor], members: _Members) -> None:
        self._tensors, self._members = tensors, members

    def parameters(self) -> Iterator[Tensor]:
        return iter(self._tensors)

    def buffers(self) -> Iterator[Tensor]:
        return self._members.module.buffers()


class _Update(AveragedModel):
    """Stands for an averaged model whose module has flat parameters, while torch's code updates it."""

    def __init__(self, averaged: AveragedModel, module: _Flat) -> None:
        vars(self).update(vars(averaged))
        vars(self).update(module=module, n_averaged=averaged.n_averaged)

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        return chain(self.module.parameters())

    def __setattr__(self, name: str, value: Any) -> None:
        vars(self)[name] = value
