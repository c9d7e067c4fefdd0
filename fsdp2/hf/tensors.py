"""Finds what a model consists of: each parameter and buffer, its names, and the part of it that this rank holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from ..engine.compat import holds_values, local_of
from ..engine.group import COPIED, FSDPParamGroup
from ..engine.owners import owners_by_id, sharded_owner, some_of
from ..engine.parameter import FSDPParam, Slot, fqn
from ..engine.state import modules_below, states_among
from ..engine.subclasses import is_packed
from ..engine.tensor_parallel import TensorParallel
from .files import Box, whole_box

# What wrappers of torch put into the names of what they wrap, and state dicts of these modules leave out.
WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")

# Names of tensors in errors and reports of files.
some = partial(some_of, most=5)


class ModelTensor:
    """One distinct parameter or persistent buffer of a model, however often registered.

    `names`: its FQNs, in the order of a state dict. `shape`, `dtype`: of the whole tensor. `box`: what this rank holds
    of it. `groups`: the process groups, one for each axis of its mesh, whose ranks hold the same part; None: it has no
    mesh.
    """

    def __init__(self, tensor: Tensor, param: FSDPParam | None) -> None:
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
        return registered(self.slots[0].module, self.slots[0].name) if self.param is None else self.param.sharded

    @property
    def local(self) -> Tensor:
        """This rank's part: a plain tensor over its memory."""
        tensor = self.tensor
        local = local_of(tensor) if isinstance(tensor, DTensor) else tensor
        return local.detach()

    def locate(self) -> None:
        """Finds out which part of it this rank holds, and who holds the same.

        Raises:
            NotImplementedError: it is a tensor subclass, or distributed in a way whose indices are not known.
        """
        tensor = self.tensor
        local: Any = local_of(tensor) if isinstance(tensor, DTensor) else tensor
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
        mesh, placements = tensor.device_mesh, tensor.placements
        self.groups = [
            mesh.get_group(axis)
            for axis, placement in enumerate(placements)
            if placement.is_replicate() and mesh.size(axis) > 1
        ]
        if self.param is None:
            self.box = self._cut(mesh, placements)
        elif not self.param.is_scalar:
            kind, dim, (first, last) = self.param.distribution, self.param.dim, self.param.bounds
            box = whole_box(self.shape)
            if isinstance(kind, TensorParallel):
                box = self._cut(kind.full_mesh, kind.full_placements)
            self.box = box.replaced(dim, box.starts[dim] + first, last - first)

    def _cut(self, mesh: DeviceMesh, placements: Sequence[Placement]) -> Box:
        """Returns the part of the tensor that this rank has by these placements."""
        box = whole_box(self.shape)
        for axis, placement in enumerate(placements):
            if type(placement) is Shard:
                dim = placement.dim % len(self.shape)
                rows = -(-box.sizes[dim] // mesh.size(axis))
                first = min(mesh.get_local_rank(axis) * rows, box.sizes[dim])
                box = box.replaced(dim, box.starts[dim] + first, min(rows, box.sizes[dim] - first))
            elif not placement.is_replicate():
                raise NotImplementedError(f"{self.name}: expected Shard or Replicate on {mesh}, got {placement}")
        return box


def find_tensors(model: nn.Module) -> list[ModelTensor]:
    """Returns the distinct parameters and persistent buffers of a model, in the order of its state dict."""
    owners = owners_by_id()
    found: dict[Any, ModelTensor] = {}
    for module, prefix, name, tensor in _entries(model):
        owned = owners.get(id(tensor))
        key = id(tensor) if owned is None else owned.param
        each = found.setdefault(key, ModelTensor(tensor, None if owned is None else owned.param))
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
        for wrapper in WRAPPERS:
            prefix = f"{prefix}.".replace(wrapper, "")[:-1]
        kept = {name: each for name, each in module._buffers.items() if name not in module._non_persistent_buffers_set}
        for name, tensor in (*module._parameters.items(), *kept.items()):
            if tensor is not None:
                yield module, prefix, name, tensor


def groups_in(model: nn.Module) -> list[FSDPParamGroup]:
    """Returns the groups of sharded modules in a model, and those of outer modules that shard parameters in it."""
    below = modules_below(model)
    found = dict.fromkeys(group for state in states_among(below) for group in state.groups)
    for tensor in model.parameters():
        owned = sharded_owner(tensor) if isinstance(tensor, DTensor) else None
        if owned is not None:
            found[owned.group] = None
    return [*found]


def settle(groups: Sequence[FSDPParamGroup], function: str) -> None:
    """Registers the sharded parameters of the groups, and takes what users have put in their places.

    Raises:
        RuntimeError: a pass runs, or full_params has registered copies.
    """
    for group in groups:
        if group.state.running or group.root.backward is not None or group.phase is COPIED:
            what = f"a forward or backward of {group} runs, or full_params has registered copies"
            raise RuntimeError(f"{function}: {what}. Call it between steps.")
    for group in groups:
        group.reshard_if_idle()
        group.adopt_replacements(may_be_untied=True)


def meshes_of(model: nn.Module, groups: Sequence[FSDPParamGroup]) -> list[DeviceMesh]:
    """Returns the meshes of all DTensors among the parameters of a model, which has these groups."""
    sharded: list[Any] = [param.sharded for group in groups for param in group.params]
    return [each.device_mesh for each in (*sharded, *model.parameters()) if isinstance(each, DTensor)]
