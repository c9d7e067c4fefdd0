"""Parameters whose local tensors say themselves how they are gathered: quantised weights, float8 casts, ...

Such a local tensor (a tensor subclass, or a tensor with two methods set on the object) has

- `fsdp_pre_all_gather(mesh)`, or `(mesh, outer_size, outer_stride, module, mp_policy)`, which returns the tensors to
  gather, of equal sizes on all ranks, and any metadata;
- `fsdp_post_all_gather(all_gather_outputs, metadata, param_dtype, *, out=None)`, which makes the full parameter of what
  was gathered: (the tensor, a tuple of tensors to free with it); with `out`, the tensor of the first time, it refills
  that and returns None.

`mesh` is the one axis over which the parameter is sharded; an output is the ranks' inputs, one behind the other in dim
0. It is the same tensor in each gather, so the full parameter may be a view of it.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from . import dtensor_compat, torch_compat
from ..core.comm import Comm, all_gather_now
from ..core.mesh import DataMesh
from ..core.gather import leaf_over
from ..core.parameter import FSDPParam
from ..core.policy import MixedPrecisionPolicy


class AllGatherExtension:
    """Gathers one parameter by its own methods."""

    def __init__(self, param: FSDPParam, mesh: DataMesh, policy: MixedPrecisionPolicy) -> None:
        self._param, self._mesh, self._policy = param, mesh, policy
        self._pre_arguments = self._choose_pre_arguments()
        self._metadata: Any = None
        # What has been gathered, and the same memory as the collective fills it: with version counters of its own.
        self._outputs: list[Tensor] = []
        self._filled: list[Tensor] = []
        self._storages: dict[int, tuple[torch.UntypedStorage, int]] = {}
        self._is_built = False

    def _choose_pre_arguments(self) -> tuple[Any, ...]:
        param = self._param
        mesh = torch_compat.mesh_over(self._mesh.mesh, self._mesh.shard_axes)
        arguments = (mesh, torch.Size(param.shape), param.sharded.stride(), param.slots[0].module, self._policy)
        return arguments[: count_pre_arguments(param.name, param.local)]

    @property
    def nbytes(self) -> int:
        """Bytes that the last gather has delivered."""
        return sum(output.nbytes for output in self._filled)

    def start(self, device: torch.device, world_size: int) -> tuple[list[Tensor], list[Tensor]]:
        """Allocate, and return what to gather into what, as bytes: nothing, if there is but one rank."""
        local: Any = self._param.local
        if local.device != device:
            local = local.to(device, non_blocking=True)
        tensors, self._metadata = local.fsdp_pre_all_gather(*self._pre_arguments)
        sizes = [(world_size * (each.shape[0] if each.dim() else 1), *each.shape[1:]) for each in tensors]
        wanted = [(size, each.dtype) for size, each in zip(sizes, tensors, strict=True)]
        if [(tuple(each.shape), each.dtype) for each in self._outputs] != wanted:
            self._allocate([torch.empty(size, dtype=dtype, device=device) for size, dtype in wanted])
        for storage, nbytes in self._storages.values():
            storage.resize_(nbytes)
        inputs = [each.contiguous().view(-1).view(torch.uint8) for each in tensors]
        if world_size > 1:
            return self._filled, inputs
        torch_compat.copy_all(self._filled, inputs)
        return [], []

    def _allocate(self, outputs: list[Tensor]) -> None:
        self._outputs, self._is_built = outputs, False
        self._filled = [leaf_over(each, 0, (each.nbytes,), torch.uint8) for each in outputs]
        self._storages.clear()
        self._own(outputs)

    def _own(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._storages[torch_compat.storage_id(tensor)] = (storage, storage.nbytes())

    def finish(self) -> bool:
        """Make the full parameter of what was gathered. Return whether it is another object than before."""
        param: Any = self._param
        arguments = (tuple(self._outputs), self._metadata, param.compute_dtype(self._policy))
        if self._is_built:
            param.local.fsdp_post_all_gather(*arguments, out=dtensor_compat.local_if_any(param.full))
            return False
        value, inner = param.local.fsdp_post_all_gather(*arguments)
        if tuple(value.shape) != param.gathered_shape:
            raise ValueError(
                f"{param.name}: expected fsdp_post_all_gather to return a tensor of shape {param.gathered_shape}, got "
                f"{tuple(value.shape)}"
            )
        self._own(inner)
        param.build_full(value)
        self._is_built = True
        return True

    def storage_ids(self) -> list[int]:
        """Of all memory that the full parameter consists of."""
        parts = torch_compat.inner_tensors(self._param.full)
        return [*self._storages, *(torch_compat.storage_id(part) for part in parts)]

    def free(self) -> None:
        """Give up what was gathered, and what was made of it."""
        for storage, _ in self._storages.values():
            storage.resize_(0)


class GroupExtensions:
    """The extended ones among one group's parameters (`params`), which are gathered together with the others."""

    def __init__(self, params: Sequence[FSDPParam], mesh: DataMesh, policy: MixedPrecisionPolicy) -> None:
        self._params, self._mesh = params, mesh
        self.members = [AllGatherExtension(param, mesh, policy) for param in params]
        # Whether all ranks are known to gather the same.
        self._agreed = mesh.size == 1

    @property
    def nbytes(self) -> int:
        """Bytes that the last gather has delivered."""
        return sum(member.nbytes for member in self.members)

    def start(self, comm: Comm) -> tuple[list[Tensor], list[Tensor]]:
        """What to gather into what. Every rank of `comm` must call it."""
        device, outputs, inputs = self._mesh.device, [], []
        with torch.inference_mode(False), torch.no_grad():
            for member in self.members:
                more_outputs, more_inputs = member.start(device, self._mesh.size)
                outputs += more_outputs
                inputs += more_inputs
        if not self._agreed:
            _check_agreement([param.name for param in self._params], inputs, comm, device)
            self._agreed = True
        return outputs, inputs

    def finish(self) -> bool:
        """Make the full parameters of what was gathered. Return whether any is another object than before."""
        with torch.inference_mode(False), torch.no_grad():
            built = [member.finish() for member in self.members]
        return any(built)

    def storage_ids(self) -> set[int]:
        """Of all memory that the full parameters consist of."""
        return {each for member in self.members for each in member.storage_ids()}

    def free(self) -> None:
        for member in self.members:
            member.free()


def refuse_part(name: str) -> NoReturn:
    raise NotImplementedError(
        f"{name} has fsdp_pre_all_gather, and can't keep a part of what it gathers. Use a bool or None for "
        "reshard_after_forward."
    )


def count_pre_arguments(name: str, local: Any) -> int:
    """How many arguments the `fsdp_pre_all_gather` of `local` takes.

    Raises:
        ValueError: neither of the two numbers it may.
    """
    signature = inspect.signature(local.fsdp_pre_all_gather)
    if len(signature.parameters) not in (1, 5):
        raise ValueError(
            f"{name}: expected fsdp_pre_all_gather(mesh) or (mesh, outer_size, outer_stride, module, mp_policy), got "
            f"{signature}"
        )
    return len(signature.parameters)


def _check_agreement(names: Sequence[str], inputs: Sequence[Tensor], comm: Comm, device: torch.device) -> None:
    """Raise ValueError on every rank if ranks are about to gather tensors of different sizes. All must call it."""
    sizes = [each.numel() for each in inputs]
    digest = hashlib.sha256(repr(sizes).encode()).digest()[:16]
    if len(set(all_gather_now(digest, comm, device))) > 1:
        raise ValueError(
            f"{', '.join(names)}: fsdp_pre_all_gather returned tensors of other sizes than on another rank (here, in "
            f"bytes: {sizes}). Ranks that hold fewer rows than the first must pad what they return to as many."
        )
