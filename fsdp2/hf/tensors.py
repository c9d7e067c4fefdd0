"""Finds what a model consists of: each parameter and buffer, its names, and the part of it that this rank holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..shards.dtensors import box_of, cuts_of, replicas_of
from ..shards.find import fqn_of, shards_of
from ..shards.protocol import Cut, ShardGroup, ShardParam
from ..shards.tensors import fqn, holds_values, is_packed, local_if_any, some_of
from .files import Box, whole_box

# Names of tensors in errors and reports of files.
some = partial(some_of, most=5)


class Slot(NamedTuple):
    """A module, and a name under which it has a parameter or buffer."""

    module: nn.Module
    name: str


class ModelTensor:
    """One distinct parameter or persistent buffer of a model, however often registered.

    `names`: its FQNs, in the order of a state dict. `shape`, `dtype`: of the whole tensor. `box`: what this rank holds
    of it. `groups`: the process groups, one for each axis of its mesh, whose ranks hold the same part; None: it has no
    mesh.
    """

    def __init__(self, tensor: Tensor, param: ShardParam | None) -> None:
        self.names: list[str] = []
        self.slots: list[Slot] = []
        self.param = param
        self.shape: tuple[int, ...] = tuple(tensor.shape) if param is None else param.shape
        self.dtype = tensor.dtype
        self.box = whole_box(self.shape)
        self.groups: Sequence[dist.ProcessGroup] | None = None

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def is_parameter(self) -> bool:
        return self.slots[0].name in self.slots[0].module._parameters

    @property
    def tensor(self) -> Tensor:
        """The tensor that is registered now."""
        return registered(self.slots[0].module, self.slots[0].name) if self.param is None else self.param.parameter

    @property
    def local(self) -> Tensor:
        """This rank's part: a plain tensor over its memory."""
        return local_if_any(self.tensor).detach()

    def values(self, box: Box) -> Tensor:
        """Returns the values of a box, which must lie in `box` of this tensor."""
        return box.of(self.local, self.box.starts)

    def locate(self, to_save: bool = False) -> None:
        """Finds out which part of it this rank holds, and who holds the same. `to_save`: it must have values.

        Raises:
            NotImplementedError: it is a tensor subclass, or distributed in a way whose indices are not known.
            RuntimeError: it has no values.
        """
        tensor = self.tensor
        if to_save and tensor.is_meta:
            raise RuntimeError(f"{self.name} is on meta: it has no values. Load or initialise the model first.")
        local = local_if_any(tensor)
        if is_packed(tensor):
            raise NotImplementedError(
                f"{self.name}: its values are packed in {tensor.dtype}, and these files can't hold what unpacks them. "
                "Save the adapters alone (fsdp2.hf.save_adapter), or dequantise the model before fully_shard."
            )
        if not holds_values(local) or local.layout != torch.strided or local.is_quantized:
            what = f"expected a dense tensor, got a {type(local).__name__} of layout {local.layout}"
            raise NotImplementedError(f"{self.name}: {what}. Convert it afterwards, or take it out meanwhile.")
        if not isinstance(tensor, DTensor):
            return
        self.groups = replicas_of(tensor)
        try:
            cuts = self.param.cuts if self.param is not None else self._cuts(tensor)
        except NotImplementedError as error:
            where = f"{tensor.placements} on {tensor.device_mesh}"
            raise NotImplementedError(f"{self.name}: expected Shard or Replicate, got {where}") from error
        box = box_of(cuts, self.shape)
        self.box = Box(tuple(each.start for each in box), tuple(each.stop - each.start for each in box))

    def _cuts(self, tensor: DTensor) -> Sequence[Cut]:
        return cuts_of(self.name, tensor.device_mesh, tensor.placements, self.shape)


def find_tensors(model: nn.Module) -> list[ModelTensor]:
    """Returns the distinct parameters and persistent buffers of a model, in the order of its state dict."""
    shards = shards_of(model)
    found: dict[object, ModelTensor] = {}
    for module, prefix, name, tensor in _entries(model):
        param = shards.find(tensor)
        each = found.setdefault(id(tensor) if param is None else param, ModelTensor(tensor, param))
        each.names.append(fqn(prefix, name))
        each.slots.append(Slot(module, name))
    return [*found.values()]


def registered(module: nn.Module, name: str) -> Tensor:
    """Returns the parameter or buffer that a module has under this name."""
    found = module._buffers[name] if name in module._buffers else module._parameters[name]
    assert found is not None, "there was one"
    return found


def _entries(model: nn.Module) -> Iterator[tuple[nn.Module, str, str, Tensor]]:
    """Yields (module, its FQN, name, tensor) for each entry that a state dict has."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        prefix = fqn_of(model, prefix)
        kept = {name: each for name, each in module._buffers.items() if name not in module._non_persistent_buffers_set}
        for name, tensor in (*module._parameters.items(), *kept.items()):
            if tensor is not None:
                yield module, prefix, name, tensor


def settle(groups: Sequence[ShardGroup], function: str) -> None:
    """Registers the sharded parameters of the groups, and takes what users have put in their places.

    Raises:
        RuntimeError: a pass runs, or full_params has registered copies.
    """
    for group in groups:
        if group.in_use is not None:
            what = f"a forward or backward of {group} runs, or full_params has registered copies"
            raise RuntimeError(f"{function}: {what}. Call it between steps.")
    for group in groups:
        group.settle(may_be_untied=True)


def meshes_of(model: nn.Module, groups: Sequence[ShardGroup]) -> list[DeviceMesh]:
    """Returns the meshes of all DTensors among the parameters of a model, which has these groups."""
    sharded = [param.parameter for group in groups for param in group.params]
    return [each.device_mesh for each in (*sharded, *model.parameters()) if isinstance(each, DTensor)]
