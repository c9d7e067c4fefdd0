"""Gathers parameters whose local tensors say themselves how: quantised weights, float8 casts, ...

Such a local tensor (a tensor subclass, or a tensor with two methods set on the object) has, from the first forward on,

- `fsdp_pre_all_gather(mesh)`, or `(mesh, outer_size, outer_stride, module, mp_policy)`, which returns the tensors to
  gather, of equal sizes on all ranks, and any metadata;
- `fsdp_post_all_gather(all_gather_outputs, metadata, param_dtype, *, out=None)`, which makes the unsharded parameter of
  the gathered tensors, and returns it with a tuple of tensors to free with it. `out` is the tensor that it has returned
  the first time: then it refills that, and returns None.

`mesh` is the one axis over which the parameter is sharded. An output is the concatenation of all ranks' inputs along
dim 0. It is the same tensor in each gather, so the unsharded parameter may be a view of it.

Subclasses whose values lie in memory of their own are sharded like plain parameters. Modules compute with a parameter
of the user's class, with its attributes; the sharded parameter has the attributes, too. Values that may be packed bits
are not cast.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from ..collectives.gather_bytes import all_gather_now
from ..engine.comm import Comm
from ..engine.gather import leaves_over
from ..engine.mesh import DataMesh
from ..engine.policy import MixedPrecisionPolicy
from ..torch_private import internals
from ..torch_private.internals import PLAIN, holds_values, inner_tensors, local_if_any, of_class, storage_id

if TYPE_CHECKING:
    from ..engine.build import Plan
    from ..engine.parameter import FSDPParam
    from ..engine.root import Root

METHODS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")


def missing_methods(local: Tensor) -> list[str]:
    """Returns which of these methods `local` lacks."""
    return [name for name in METHODS if not hasattr(local, name)]


def gathers_itself(local: Tensor) -> bool:
    """Returns True if `local` says itself how it is gathered, or must: its values lie in other tensors."""
    is_plain = type(local) is Tensor and not vars(local)  # users also set the methods on one tensor
    return not is_plain and (not missing_methods(local) or not holds_values(local))


def refuse_without_methods(param: FSDPParam) -> None:
    """
    Raises:
        NotImplementedError: the local tensor lacks one of both methods.
    """
    missing = missing_methods(param.local)
    if missing:
        raise NotImplementedError(no_methods(param.name, param.sharded, missing))


def no_methods(name: str, tensor: Tensor, missing: Sequence[str]) -> str:
    """Returns the text of an error about a tensor that lacks the methods `missing`."""
    cls = type(local_if_any(tensor)).__name__
    what = f"{cls} lacks one of the two methods that say how it is gathered"
    if len(missing) > 1:
        what = f"its values lie in other tensors, and {cls} does not say how these are gathered"
    can_be_ignored = "" if tensor.requires_grad else ", or put the parameter into ignored_params of fully_shard"
    return (
        f"{name}, of shape {tuple(tensor.shape)} and dtype {tensor.dtype}: {what}. Give the class "
        f"{' and '.join(missing)}, before the first forward at the latest{can_be_ignored}."
    )


# ---- values that must not be cast


# Attributes of modules that make a forward lay the weight out anew, in place: those of bitsandbytes do, on some CPUs.
_REWRITES = ("support_avx512bf16_for_cpu",)


def plan_packed_values(plan: Plan) -> None:
    """Keeps the dtypes of packed values.

    Raises:
        ValueError: a policy would cast a frozen parameter whose values may be packed, and the user has not said which
            holds.
    """
    for name, each in plan.parameters.items():
        slot = each.slots[0]
        parameter: Any = slot.module._parameters[slot.name]
        if type(parameter) is nn.Parameter:
            continue
        if is_packed(parameter):
            plan.parameters[name] = each._replace(keeps_dtype=True)
            for slot in each.slots:
                for switch in _REWRITES:
                    if vars(slot.module).get(switch):
                        setattr(slot.module, switch, False)
        elif each.keeps_dtype is None and not parameter.requires_grad:
            _refuse_cast(name, parameter, plan.given.mp_policy)


def is_packed(parameter: Tensor) -> bool:
    """Returns True if the dtype of `parameter` is only the container of packed values, as bitsandbytes says it."""
    return type(parameter) not in PLAIN and isinstance(getattr(parameter, "quant_storage", None), torch.dtype)


def _refuse_cast(name: str, parameter: nn.Parameter, policy: MixedPrecisionPolicy) -> None:
    dtype = policy.compute_dtype(parameter.dtype)
    if dtype == parameter.dtype or gathers_itself(parameter) or _is_tag(parameter):
        return
    cls = type(parameter).__name__
    raise ValueError(
        f"{name}: expected a frozen {cls} to be in {dtype}, the param_dtype of mp_policy, got {parameter.dtype}. A "
        f"cast destroys values that are packed in {parameter.dtype}. Pass to MixedPrecisionPolicy "
        f"param_dtype_override_fn=lambda p: p.dtype if isinstance(p, {cls}) else None, which leaves them as they are; "
        f"with {dtype} in place of p.dtype it casts them."
    )


def _is_tag(parameter: nn.Parameter) -> bool:
    """Returns True if the class and the attributes of `parameter` can't be what its values are to be read by."""
    added = [cls for cls in type(parameter).__mro__ if not issubclass(Tensor, cls) and cls is not nn.Parameter]
    described = {name: value for cls in added for name, value in vars(cls).items() if not name.startswith("__")}
    described |= vars(parameter)
    overrides = any("__torch_function__" in vars(cls) or "__torch_dispatch__" in vars(cls) for cls in added)
    return not overrides and all(isinstance(value, str | bool | None) for value in described.values())


# ---- the gather


@torch.no_grad()
def rows_of_subclass(whole: Tensor, dim: int, mesh: DataMesh, device: torch.device) -> Tensor:
    """Returns this rank's rows of a tensor subclass, by the few operations that such classes are known to have."""
    chunks = torch.chunk(whole, mesh.size, dim)
    padded = whole.new_zeros(chunks[0].size())
    rows = chunks[mesh.rank].shape[dim] if mesh.rank < len(chunks) else 0
    if rows:
        padded.narrow(dim, 0, rows).copy_(chunks[mesh.rank])
    padded = padded if padded.device == device else padded.to(device)
    return padded if rows == padded.shape[dim] else padded.narrow(dim, 0, rows)


class _OneParameter:
    """Gathers one parameter by its own methods."""

    def __init__(self, param: FSDPParam, mesh: DataMesh, policy: MixedPrecisionPolicy) -> None:
        self._param, self._mesh, self._policy = param, mesh, policy
        self._metadata: Any = None
        # The outputs, and tensors over the same memory that the collective fills. These have other version counters.
        self._outputs: list[Tensor] = []
        self._filled: list[Tensor] = []
        self._storages: dict[int, tuple[torch.UntypedStorage, int]] = {}
        self._is_built = False

    @cached_property
    def _pre_arguments(self) -> tuple[Any, ...]:
        """The arguments of `fsdp_pre_all_gather`, which may have been set until the first gather."""
        param = self._param
        mesh = internals.mesh_over(self._mesh.mesh, self._mesh.shard_axes)
        arguments = (mesh, torch.Size(param.shape), param.sharded.stride(), param.slots[0].module, self._policy)
        return arguments[: count_pre_arguments(param.name, param.local)]

    @property
    def nbytes(self) -> int:
        """The bytes that the last gather has delivered."""
        return sum(output.nbytes for output in self._filled)

    def start(self, device: torch.device, world_size: int) -> tuple[list[Tensor], list[Tensor]]:
        """Allocates the outputs. Returns the outputs and inputs of the all-gather, as bytes; on one rank, none."""
        local: Any = self._param.local
        refuse_without_methods(self._param)
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
        if inputs:
            internals.copy_all(self._filled, inputs)
        return [], []

    def _allocate(self, outputs: list[Tensor]) -> None:
        self._outputs, self._is_built = outputs, False
        self._filled = [leaf for each in outputs for leaf in leaves_over(each, [(0, (each.nbytes,), torch.uint8)])]
        self._storages.clear()
        self._own(outputs)

    def _own(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._storages[storage_id(tensor)] = (storage, storage.nbytes())

    def finish(self) -> bool:
        """Makes the unsharded parameter of the outputs. Returns True if it is another object than before."""
        param: Any = self._param
        arguments = (tuple(self._outputs), self._metadata, param.compute_dtype(self._policy))
        if self._is_built:
            param.local.fsdp_post_all_gather(*arguments, out=local_if_any(param.unsharded))
            return False
        value, inner = param.local.fsdp_post_all_gather(*arguments)
        if tuple(value.shape) != param.gathered_shape:
            raise ValueError(
                f"{param.name}: expected fsdp_post_all_gather to return a tensor of shape {param.gathered_shape}, got "
                f"{tuple(value.shape)}"
            )
        self._own(inner)
        param.build_unsharded(value)
        self._is_built = True
        return True

    def storage_ids(self) -> list[int]:
        """Returns the identities of all memory that the unsharded parameter consists of."""
        return [*self._storages, *(storage_id(part) for part in inner_tensors(self._param.unsharded))]

    def free(self) -> None:
        """Frees the outputs, and the unsharded parameter."""
        for storage, _ in self._storages.values():
            storage.resize_(0)


class SubclassGather:
    """Gathers the parameters of one group that say themselves how, together with the others."""

    def __init__(self, params: Sequence[FSDPParam], mesh: DataMesh, policy: MixedPrecisionPolicy) -> None:
        self.params, self._mesh = params, mesh
        self.members = [_OneParameter(param, mesh, policy) for param in params]
        # True if all ranks are known to gather tensors of the same sizes.
        self._is_compared = self._mesh.size == 1

    @property
    def nbytes(self) -> int:
        return sum(member.nbytes for member in self.members)

    def start(self, comm: Comm) -> tuple[list[Tensor], list[Tensor]]:
        device, outputs, inputs = self._mesh.device, [], []
        with torch.inference_mode(False), torch.no_grad():
            for member in self.members:
                more_outputs, more_inputs = member.start(device, self._mesh.size)
                outputs += more_outputs
                inputs += more_inputs
        if not self._is_compared:
            _compare_sizes([param.name for param in self.params], inputs, comm, device)
            self._is_compared = True
        return outputs, inputs

    def finish(self) -> bool:
        with torch.inference_mode(False), torch.no_grad():
            built = [member.finish() for member in self.members]
        return any(built)

    def storage_ids(self) -> set[int]:
        return {each for member in self.members for each in member.storage_ids()}

    def free(self) -> None:
        for member in self.members:
            member.free()


def take_methods_set_later(root: Root) -> None:
    """Takes methods that a user has set after `fully_shard`, on a class or a local tensor; refuses wrappers without.

    A root calls it when the first pass begins, and again when a pass begins after a group was rebuilt.
    """
    for group in root.groups:
        specs = group.parameters.specs
        for param in group.params:
            if param.leaf_class is not nn.Parameter:
                _take_methods_of_class(param)
        if specs and [gathers_itself(param.local) for param in group.params] != [spec.self_gathering for spec in specs]:
            group.parameters.adopt([])
        if group.parameters.self_gather is not None:
            for param in group.parameters.self_gather.params:
                refuse_without_methods(param)


def _take_methods_of_class(param: FSDPParam) -> None:
    """Gives the local tensor the user's class, if that has both methods now, and holds values itself."""
    cls = param.leaf_class
    if type(param.local) is Tensor and all(hasattr(cls, name) for name in METHODS):
        local = of_class(param.local, cls)
        vars(local).update(vars(param.sharded))
        param.local = local


def refuse_secondary_shards(name: str) -> NoReturn:
    """Raises NotImplementedError for an int for reshard_after_forward, and for `outer_shard`."""
    raise NotImplementedError(
        f"{name} has fsdp_pre_all_gather, and can't keep a part of what it gathers. Use a bool or None for "
        "reshard_after_forward, and no outer_shard."
    )


def count_pre_arguments(name: str, local: Any) -> int:
    """Returns how many arguments the `fsdp_pre_all_gather` of `local` takes.

    Raises:
        ValueError: neither 1 nor 5.
    """
    signature = inspect.signature(local.fsdp_pre_all_gather)
    if len(signature.parameters) not in (1, 5):
        raise ValueError(
            f"{name}: expected fsdp_pre_all_gather(mesh) or (mesh, outer_size, outer_stride, module, mp_policy), got "
            f"{signature}"
        )
    return len(signature.parameters)


def _compare_sizes(names: Sequence[str], inputs: Sequence[Tensor], comm: Comm, device: torch.device) -> None:
    """Raises ValueError on every rank if ranks are about to gather tensors of different sizes. All must call it."""
    sizes = [each.numel() for each in inputs]
    digest = hashlib.sha256(repr(sizes).encode()).digest()[:16]
    if len(set(all_gather_now(digest, comm, device))) > 1:
        raise ValueError(
            f"{', '.join(names)}: fsdp_pre_all_gather returned tensors of other sizes than on another rank (here, in "
            f"bytes: {sizes}). Ranks that hold fewer rows than the first must pad what they return to as many."
        )
