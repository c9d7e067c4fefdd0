"""One parameter of a group: its sharded face, which users see, and its full face, which modules compute with."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from . import dtensor_compat, torch_compat
from .layout import ParamSpec, param_spec
from .mesh import DataMesh, Distribution
from .pack import contiguous_stride
from .policy import MixedPrecisionPolicy

# Left on an original parameter, with its name: if it turns up again, it was tied across groups, or is in an optimizer.
SHARDED_AS = "_fsdp2_sharded_as"
# What a local tensor has that says itself how it is gathered: see extension.py.
EXTENSION = ("fsdp_pre_all_gather", "fsdp_post_all_gather")


def lacks_of_extension(local: Tensor) -> list[str]:
    """Which of these methods `local` lacks."""
    return [name for name in EXTENSION if not hasattr(local, name)]


def is_extended(local: Tensor) -> bool:
    """Whether `local` says itself how it is gathered."""
    is_plain = type(local) is Tensor and not vars(local)  # users also set the methods on one tensor
    return not is_plain and not lacks_of_extension(local)


@dataclass(frozen=True)
class Slot:
    """A place where a parameter is registered. Tied parameters have several."""

    module: nn.Module
    name: str

    def get(self) -> nn.Parameter:
        return self.module._parameters[self.name]  # type: ignore[return-value]

    @property
    def is_plain(self) -> bool:
        """Whether writing the module's dict is all that `setattr` would do (nn.LSTM keeps a list besides)."""
        return type(self.module).__setattr__ is nn.Module.__setattr__


def without_graph(parameter: Tensor) -> Tensor:
    """To read from where grad is off: a plain one as it is, for to detach it takes time."""
    return parameter if type(parameter) is nn.Parameter else parameter.detach()


def fqn(prefix: str, name: str) -> str:
    """Of what a module calls `name`, `prefix` being the module's: "" for a root."""
    return f"{prefix}.{name}" if prefix else name


# The full face of every parameter until its group has a storage.
_NO_STORAGE = nn.Parameter(torch.empty(0, device="cpu"))
# Identity of a full face -> the parameter whose it is, or was.
_of_full: weakref.WeakValueDictionary[int, FSDPParam] = weakref.WeakValueDictionary()


def names_of_full(tensor: Tensor) -> list[str]:
    """The names of the parameter of which `tensor` is the full face: none, if it is no such."""
    param = _of_full.get(id(tensor))
    return param.names if param is not None and param.full is tensor else []


class FSDPParam:
    """One distinct parameter (however often registered), and its two faces.

    `sharded`: nn.Parameter, a DTensor of the true global shape, sharded along `dim`, whose local tensor holds this
        rank's rows without padding. It is the same object as long as nobody replaces it.
    `full`: nn.Parameter, a leaf over the group's full storage, whose data is there between unshard and reshard; a plain
        tensor, or the DTensor that tensor parallelism has made.
    `made`: how many there have been in this process.
    """

    made = 0

    def __init__(
        self,
        slots: list[Slot],
        name: str,
        mesh: DataMesh,
        distribution: Distribution,
        rest: torch.device,
        keeps_dtype: bool,
        memory: torch_compat.Memory | None,
    ) -> None:
        self.slots, self._mesh, self.distribution = slots, mesh, distribution
        # Where the sharded face lives.
        self.rest = rest
        # Whether it computes in the dtype in which it is stored, whatever the policy says of the others.
        self._keeps_dtype = keeps_dtype
        # FQNs of the slots. Errors call the parameter by the first.
        self.names = [name] * len(slots)
        original = slots[0].get()
        # Where it was before it was sharded.
        self.memory = memory
        # Of all of it, and of what the ranks of `mesh` share: the same but for tensor parallelism.
        self.shape = self.gathered_shape = tuple(original.shape)
        if isinstance(original, DTensor):
            self.gathered_shape = tuple(dtensor_compat.local_of(original).shape)
        # A scalar is replicated. In collectives it is a vector of as many copies as ranks, of which each holds one.
        self._is_scalar = self.shape == ()
        if self._is_scalar:
            self.gathered_shape = (mesh.size,)
        # First row, or column, of this rank's along `dim` of what the ranks of the mesh share; and that after the last.
        self.bounds = self._spec_for(original.dtype, original.dtype).rows(mesh.rank)
        # Gradients are reduced as they come.
        self.is_usual = distribution.full_mesh is None and not self._is_scalar
        self.full = _NO_STORAGE
        FSDPParam.made += 1
        self._shard(original)

    def __getstate__(self) -> dict[str, Any]:
        """What a copy starts from; its sharded face is what is registered in the copied modules."""
        faces = ("full", "sharded", "dtensor_spec", "local_shape", "_local_stride", "memory", "_make_gradient")
        return {name: value for name, value in vars(self).items() if name not in faces}

    def wake(self) -> None:
        """Become usable, in a copy of which all modules are there."""
        self.full, self.memory = _NO_STORAGE, None
        self.sharded = self.slots[0].get()
        dtensor_compat.of_chosen_class(self.sharded)  # type: ignore[arg-type]
        self.sharded.grad = None  # as copies of plain parameters have none
        self._prepare_gradients(self.local)

    def _shard(self, whole: Tensor) -> None:
        """Replace the whole parameter, in all its slots, by this rank's rows of it. Grad is off."""
        self.sharded = self.cut(whole)
        self.register(self.sharded)

    def cut(self, whole: Tensor) -> nn.Parameter:
        """Return this rank's rows of `whole` as a sharded parameter, which is registered nowhere. Grad is off."""
        kind = self.distribution
        gathered = self.gathered(without_graph(whole))
        device = gathered.device if gathered.is_meta else self.rest
        if type(gathered) not in (Tensor, nn.Parameter):
            rows = _rows_of_subclass(gathered, kind.dim, self._mesh, device)
        else:
            rows = self.copy_rows(gathered, device)
        return self._wrap(rows, whole)

    def gathered(self, whole: Tensor) -> Tensor:
        """What the ranks of the mesh share of it: less than all under tensor parallelism."""
        kind = self.distribution
        if kind.full_mesh is None:
            return whole
        if not isinstance(whole, DTensor):
            whole = dtensor_compat.cut(whole.detach(), kind.full_mesh, kind.full_placements)
        return dtensor_compat.local_of(whole)

    def _prepare_gradients(self, local: Tensor) -> None:
        """What all gradients have in common: they lie like `local`, the sharded face's local tensor, if contiguous."""
        kind = self.distribution
        self.dtensor_spec = self._mesh.dtensor_spec(kind.mesh, kind.placements, self.shape, local.dtype)
        self.local_shape, self._local_stride = local.shape, contiguous_stride(local.shape)
        self._make_gradient = dtensor_compat.maker()

    def _wrap(self, local: Tensor, original: Tensor) -> nn.Parameter:
        self._prepare_gradients(local)
        if not dtensor_compat.DISPATCHES_TO_SUBCLASSES:
            dtensor_compat.meshes_in_use.add(self.dtensor_spec.mesh)
        tensor = dtensor_compat.dtensor(local, self.dtensor_spec)
        sharded = dtensor_compat.distributed_parameter(tensor, original.requires_grad)
        sharded.__dict__.update(_user_attributes(original))
        torch_compat.take_hooks(original, sharded)
        return sharded

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def dim(self) -> int:
        """Along which the data-parallel ranks cut it."""
        return self.distribution.dim

    def spec(self, policy: MixedPrecisionPolicy) -> ParamSpec:
        """What the layout must know of it as it is now."""
        return self._spec_for(self.local.dtype, self.compute_dtype(policy), self.is_extended)

    @property
    def is_extended(self) -> bool:
        """Whether its local tensor says itself how it is gathered."""
        return is_extended(self.local)

    def compute_dtype(self, policy: MixedPrecisionPolicy) -> torch.dtype:
        stored = self.local.dtype
        return stored if self._keeps_dtype else policy.compute_dtype(stored)

    def _spec_for(self, stored: torch.dtype, compute: torch.dtype, extended: bool = False) -> ParamSpec:
        return param_spec(self.gathered_shape, stored, compute, self._mesh.size, self.distribution.dim, extended)

    def build_full(self, memory: Tensor) -> None:
        """Have a full face over `memory`, which has its dtype and the gathered shape: the same as before, if it can be,
        for graphs of before give it their gradients.
        """
        if self.full is not _NO_STORAGE and type(memory) is Tensor and self.full.dtype == memory.dtype:
            self.move_full(memory)
            return
        self.full = self.face_of(memory, memory.is_floating_point())
        _of_full[id(self.full)] = self
        self._share_attributes()

    def empty_full(self) -> None:
        """Have no memory under the full face, until it is built again."""
        nothing = dtensor_compat.local_if_any(self.full).detach().new_empty(0)
        if isinstance(self.full, DTensor):
            dtensor_compat.set_local(self.full, nothing)
        else:
            self.full.data = nothing

    def renew_full(self, memory: Tensor) -> None:
        """Have another full face over `memory`: graphs of the one before expect gradients of another shape."""
        self.full = _NO_STORAGE
        self.build_full(memory)

    def _share_attributes(self) -> None:
        """What users set on one face, now or later, stands on the other, too."""
        if type(self.full) is nn.Parameter or isinstance(self.full, DTensor):
            self.full.__dict__ = vars(self.sharded)
        else:  # whose class keeps its inner tensors there
            vars(self.full).update(_user_attributes(self.sharded))

    def move_full(self, memory: Tensor) -> None:
        """Have the full face over other `memory`."""
        value = memory[0] if self._is_scalar else memory
        if isinstance(self.full, DTensor):
            dtensor_compat.set_local(self.full, value)
        else:
            self.full.data = value

    def face_of(self, memory: Tensor, requires_grad: bool) -> nn.Parameter:
        """A full parameter, as modules have it, whose data is `memory`, of the gathered shape."""
        kind, value = self.distribution, memory[0] if self._is_scalar else memory
        if kind.full_mesh is None:
            return nn.Parameter(value, requires_grad)
        spec = self._mesh.dtensor_spec(kind.full_mesh, kind.full_placements, self.shape, value.dtype)
        return dtensor_compat.distributed_parameter(dtensor_compat.new_dtensor(DTensor, value, spec), requires_grad)

    def own_rows(self, gathered: Tensor) -> Tensor:
        """This rank's rows of what the ranks of `mesh` share: a view."""
        first, last = self.bounds
        return gathered if self._is_scalar else gathered.narrow(self.dim, first, last - first)

    def copy_rows(self, gathered: Tensor, device: torch.device) -> Tensor:
        """The same in memory of their own: the whole is not kept."""
        if gathered.device != device or self._is_scalar:
            return self.own_rows(gathered).to(device, copy=True, memory_format=torch.contiguous_format)
        first, last = self.bounds
        return torch.narrow_copy(gathered, self.dim, first, last - first)  # in half the time

    def gathered_gradient(self, gradient: Tensor) -> Tensor:
        """A gradient of the full face as the ranks of the mesh share it: the same, if the parameter `is_usual`."""
        if self.distribution.full_mesh is not None:
            gradient = self._local_gradient(gradient)
        return gradient.repeat(self.gathered_shape) if self._is_scalar else gradient

    def _local_gradient(self, gradient: Tensor) -> Tensor:
        kind = self.distribution
        assert isinstance(gradient, DTensor), "a gradient is distributed like its parameter"
        expected = list(kind.full_placements)
        if kind.full_mesh == self._mesh.mesh:
            # Modules that compute with DTensors on these axes, too, leave it to us to sum over them.
            for axis in self._mesh.shard_axes + self._mesh.replicate_axes:
                if gradient.placements[axis].is_partial("sum"):
                    expected[axis] = gradient.placements[axis]
        if gradient.placements != tuple(expected):
            gradient = gradient.redistribute(placements=expected)
        return dtensor_compat.local_of(gradient)

    @property
    def local(self) -> Tensor:
        """This rank's rows, unpadded."""
        return dtensor_compat.local_of(self.sharded)

    @local.setter
    def local(self, value: Tensor) -> None:
        dtensor_compat.set_local(self.sharded, value)

    def register(self, face: nn.Parameter) -> None:
        """Put one of the faces into every slot."""
        for slot in self.slots:
            if slot.is_plain:
                slot.module._parameters[slot.name] = face
            else:
                setattr(slot.module, slot.name, face)

    def replace(self, found: nn.Parameter) -> None:
        """Take `found`, which replacements.py has looked at, as the sharded face."""
        if not isinstance(found, DTensor) or not self.distribution.is_of_sharded(found):
            self._shard(found)
            self._share_attributes()
            return
        if found.stride() != contiguous_stride(self.shape):
            # Shards are always contiguous; the object must say so, and stay the one that users hold.
            torch.utils.swap_tensors(found, self._wrap(dtensor_compat.local_of(found).contiguous(), found))
        dtensor_compat.of_chosen_class(found)
        self.sharded = found
        self._share_attributes()
        self._prepare_gradients(self.local)
        self.register(found)

    def accumulate(self, flat: Tensor, offset: int, is_hooked: bool) -> None:
        """Add this rank's gradient shard, which begins at `offset` of `flat`, to the sharded face's `.grad`.

        `flat` has the storage dtype. The hooks of the sharded face, if it may have any (`is_hooked`), run: on the
        gradient as in plain training, then on the parameter.
        """
        gradient: Any = self._make_gradient(
            flat.as_strided(self.local_shape, self._local_stride, offset), self.dtensor_spec
        )
        sharded = self.sharded
        hooks, post_accumulate_hooks = torch_compat.gradient_hooks(sharded) if is_hooked else (None, None)
        if hooks:
            for hook in tuple(hooks.values()):  # a hook may remove itself
                replaced = hook(gradient)
                gradient = gradient if replaced is None else replaced
        accumulated = sharded.grad
        if accumulated is None:
            sharded.grad = gradient
        else:
            if not isinstance(accumulated, DTensor):
                raise TypeError(
                    f"{self.name}: expected .grad to be None or a DTensor, got a {type(accumulated).__name__}. Use "
                    "distribute_tensor(gradient, p.device_mesh, p.placements)."
                )
            if accumulated.placements != gradient.placements:
                # Computed on shards, with DTensors: not all operations leave it as the parameter is.
                sharded.grad = accumulated = accumulated.redistribute(placements=gradient.placements)
            dtensor_compat.local_of(accumulated).add_(dtensor_compat.local_of(gradient))
        if post_accumulate_hooks:
            for hook in tuple(post_accumulate_hooks.values()):
                hook(sharded)


@torch.no_grad()
def _rows_of_subclass(whole: Tensor, dim: int, mesh: DataMesh, device: torch.device) -> Tensor:
    """This rank's rows of a tensor subclass, made by the few operations that such classes are known to have."""
    chunks = torch.chunk(whole, mesh.size, dim)
    padded = whole.new_zeros(chunks[0].size())
    rows = chunks[mesh.rank].shape[dim] if mesh.rank < len(chunks) else 0
    if rows:
        padded.narrow(dim, 0, rows).copy_(chunks[mesh.rank])
    padded = padded if padded.device == device else padded.to(device)
    return padded if rows == padded.shape[dim] else padded.narrow(dim, 0, rows)


def _user_attributes(parameter: Tensor) -> dict[str, Any]:
    """What users have set on a parameter, without what a tensor subclass keeps there: its inner tensors."""
    attributes = vars(parameter)
    if type(parameter) is nn.Parameter or isinstance(parameter, DTensor):
        return attributes
    own = vars(parameter.detach())
    return {name: value for name, value in attributes.items() if name not in own}
