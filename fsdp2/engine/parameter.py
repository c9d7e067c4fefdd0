"""Holds one parameter of a group: the sharded one that users see, and the unsharded one that modules compute with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..parameters.subclasses import gathers_itself, rows_of_subclass
from ..torch_private import internals
from ..torch_private.internals import GradDtype, local_of
from .codec import Codec
from .events import extensions
from .layout import ParamSpec, bounds_of, contiguous_stride, param_spec
from .mesh import DataMesh, Distribution
from .policy import MixedPrecisionPolicy


@dataclass(unsafe_hash=True)  # frozen, it would take three times as long to make
class Slot:
    """A module and a name under which it has a parameter. Tied parameters have several slots."""

    module: nn.Module
    name: str

    def get(self) -> nn.Parameter:
        """Returns the parameter that is registered now."""
        return self.module._parameters[self.name]  # type: ignore[return-value]

    @property
    def is_plain(self) -> bool:
        """True if writing the module's dict is all that `setattr` would do (nn.LSTM keeps a list besides)."""
        return type(self.module).__setattr__ is nn.Module.__setattr__


def fqn(prefix: str, name: str) -> str:
    """Returns the FQN of `name` in a module whose FQN is `prefix`; a root's FQN is empty."""
    return f"{prefix}.{name}" if prefix else name


# The unsharded parameter of every FSDPParam until its group has a storage.
NOT_BUILT = nn.Parameter(torch.empty(0, device="cpu"))


# The attributes of a parameter that a copy builds anew.
_TENSORS = {
    *("unsharded", "sharded", "dtensor_spec", "gradient_spec", "delivered_dtype", "local_shape", "local_stride"),
    *("placeholders", "tensor_class", "_attributes"),
}
# The key of a user's class among the attributes of a sharded parameter.
USER_CLASS = "_fsdp2_user_class"


class FSDPParam:
    """One distinct parameter, however often registered."""

    # The dtype that `.grad` is to have, and in which autograd accumulates the unsharded gradient, as the user has
    # chosen it by `parameter.grad_dtype` or by the policy. None: nobody has.
    grad_choice: GradDtype | None = None
    # The dtype of `.grad`.
    delivered_dtype: torch.dtype
    # Class of placeholders -> the one that was taken out of `.grad` last, to be used again.
    placeholders: dict[type[DTensor], Any]
    # The one that users see: a DTensor of the true global shape, sharded along `dim`, whose local tensor holds this
    # rank's rows without padding. It is the same object until a user replaces it.
    sharded: nn.Parameter

    def __init__(
        self,
        slots: list[Slot],
        name: str,
        mesh: DataMesh,
        distribution: Distribution,
        storage_device: torch.device,
        keeps_dtype: bool | None,
        grad_dtype: torch.dtype | None = None,
    ) -> None:
        self.slots, self.mesh, self.distribution, self.dim = slots, mesh, distribution, distribution.dim
        # Where the sharded parameter lives.
        self.storage_device = storage_device
        # It computes in its own dtype, whatever the policy says of the others.
        self._keeps_dtype = keeps_dtype is True
        # FQNs of the slots; errors call it by the first.
        self.names = [name] * len(slots)
        original = slots[0].get()
        chosen = internals.chosen_grad_dtype(original)
        self.grad_choice = chosen if grad_dtype is None else grad_choice(original, grad_dtype)
        self._user_class: type[Any] = nn.Parameter
        if distribution.is_annotated:
            original = distribution.whole(original)
        if type(original) is not nn.Parameter:
            original = _on_device(original, mesh.device)
            self._user_class = _user_class(original)
        # The class of the unsharded parameter: the user's own subclass of nn.Parameter or Tensor, if the parameter had
        # one, with values in memory of its own.
        self.leaf_class: type[Tensor] = self._user_class
        # The shape of the whole parameter, and of what the ranks of `mesh` share of it: less under tensor parallelism.
        self.shape = self.gathered_shape = tuple(original.shape)
        if isinstance(original, DTensor):  # of tensor parallelism
            self.gathered_shape = tuple(local_of(original).shape)
        # A scalar is replicated. In collectives it is a vector of as many copies as ranks, of which each holds one.
        self.is_scalar = self.shape == ()
        if self.is_scalar:
            self.gathered_shape = (mesh.size,)
        # This rank's first row along `dim` of what the ranks share, and the one after its last.
        self.bounds = bounds_of(self.gathered_shape[self.dim], mesh.size, mesh.rank)
        # The one that modules compute with: a leaf over the group's storage, whose data is there from unshard to
        # reshard; a plain tensor, or the DTensor of tensor parallelism.
        self.unsharded = NOT_BUILT
        # How often a gradient was added to an earlier one in `.grad`. A check compares it between ranks.
        self.num_added = 0
        self.sharded = self.cut(original)
        # The attributes of the sharded parameter, also when `.to` and `to_empty` have given it others.
        self._attributes = vars(self.sharded)
        self.register(self.sharded)

    def description(self) -> dict[str, Any]:
        """Returns what `copied` takes: everything but the tensors."""
        return {name: value for name, value in vars(self).items() if name not in _TENSORS}

    @classmethod
    def copied(cls, description: dict[str, Any]) -> FSDPParam:
        """Returns the parameter of a copied module. `description`: that of the original, whose slots are copied."""
        param = object.__new__(cls)
        vars(param).update(description)
        sharded: Any = param.slots[0].get()
        if type(sharded) is DTensor:
            sharded.__class__ = extensions().tensor_class
        param.unsharded, param.sharded, param._attributes = NOT_BUILT, sharded, vars(sharded)
        param.put_gradient(None)  # as copies of plain parameters have none
        param.prepare_gradients(param.local)
        return param

    @property
    def name(self) -> str:
        """The FQN by which errors call it."""
        return self.names[0]

    @property
    def local(self) -> Tensor:
        """This rank's rows, without padding."""
        return local_of(self.sharded)

    @local.setter
    def local(self, value: Tensor) -> None:
        internals.set_local(self.sharded, value)

    @property
    def keeps_dtype(self) -> bool:
        """True if it computes in its own dtype, whatever the policy says of the others."""
        return self._keeps_dtype

    def spec(self, policy: MixedPrecisionPolicy) -> ParamSpec:
        """Returns what the layout must know of it as it is now."""
        local = self.local
        self_gathering, codec = gathers_itself(local), None
        if not self_gathering and not self._keeps_dtype:
            codec = policy.gather_codec_for(local.dtype, self.shape)
        compute_dtype = local.dtype if self._keeps_dtype else policy.compute_dtype(local.dtype)
        spec = self._spec_of(local.dtype, compute_dtype, self_gathering, codec)
        if self.grad_choice is not None:
            spec = with_grad_dtype(spec, self.grad_choice, policy)
            self._deliver_in(spec.delivered_dtype)
        return spec

    def compute_dtype(self, policy: MixedPrecisionPolicy) -> torch.dtype:
        """Returns the dtype of the unsharded parameter."""
        stored = self.local.dtype
        return stored if self._keeps_dtype else policy.compute_dtype(stored)

    def _spec_of(
        self, stored: torch.dtype, compute: torch.dtype, self_gathering: bool = False, codec: Codec | None = None
    ) -> ParamSpec:
        size, dim = self.mesh.size, self.distribution.dim
        return param_spec(self.gathered_shape, stored, compute, size, dim, self_gathering, codec)  # type: ignore[arg-type]

    # ---- from the whole parameter to its shard

    def cut(self, whole: Tensor) -> nn.Parameter:
        """Returns this rank's rows of `whole` as a sharded parameter, which is registered nowhere. Grad must be off."""
        values, has_methods = whole, False
        if type(whole) is not nn.Parameter:
            is_of_users = _user_class(whole) is not nn.Parameter
            has_methods = is_of_users and gathers_itself(whole)
            values = internals.plain_values(whole) if is_of_users and not has_methods else whole.detach()
        gathered = self.gathered(values)
        local = self.copy_rows(gathered, gathered.device if gathered.is_meta else self.storage_device)
        if has_methods and type(local) is Tensor:  # a subclass of nn.Parameter, which operations do not return
            local = internals.of_class(local, type(whole))
            vars(local).update(vars(whole))
        return self._as_sharded(local, whole)

    def gathered(self, whole: Tensor) -> Tensor:
        """Returns what the ranks of the mesh share of it: less than all under tensor parallelism."""
        return self.distribution.gathered_part(whole)

    def own_rows(self, gathered: Tensor) -> Tensor:
        """Returns this rank's rows of what the ranks of the mesh share, as a view."""
        first, last = self.bounds
        return gathered if self.is_scalar else gathered.narrow(self.dim, first, last - first)

    def copy_rows(self, gathered: Tensor, device: torch.device) -> Tensor:
        """Returns this rank's rows in memory of their own, so that the whole parameter can be freed."""
        if type(gathered) not in internals.PLAIN:
            return rows_of_subclass(gathered, self.dim, self.mesh, device)
        if gathered.device != device or self.is_scalar:
            return self.own_rows(gathered).to(device, copy=True, memory_format=torch.contiguous_format)
        first, last = self.bounds
        return torch.narrow_copy(gathered, self.dim, first, last - first)  # in half the time

    def _as_sharded(self, local: Tensor, original: Tensor) -> nn.Parameter:
        self.prepare_gradients(local)
        kind = self.tensor_class, local, self.dtensor_spec
        sharded = internals.distributed_parameter(*kind, original.requires_grad)
        sharded.__dict__.update(_user_attributes(original))
        if self._user_class is not nn.Parameter:
            sharded.__dict__[USER_CLASS] = self._user_class
        internals.take_hooks(original, sharded)
        if self.grad_choice is not None:
            internals.set_grad_dtype(sharded, self.grad_choice.dtype)
        return sharded

    def prepare_gradients(self, local: Tensor) -> None:
        """Prepares what all gradients have in common: they lie like `local`, made contiguous."""
        kind = self.distribution
        self.dtensor_spec = self.mesh.dtensor_spec(kind.mesh, kind.placements, self.shape, local.dtype)
        self.gradient_spec, self.delivered_dtype, self.placeholders = self.dtensor_spec, local.dtype, {}
        if self.grad_choice is not None:
            self._deliver_in(self.grad_choice.dtype or local.dtype)
        self.local_shape, self.local_stride = local.shape, contiguous_stride(local.shape)
        self.tensor_class = extensions().tensor_class

    def _deliver_in(self, dtype: torch.dtype) -> None:
        """Delivers gradients of that dtype from now on."""
        kind, self.delivered_dtype = self.distribution, dtype
        self.gradient_spec = self.mesh.dtensor_spec(kind.mesh, kind.placements, self.shape, dtype)

    def choose_grad_dtype(self, dtype: torch.dtype | None) -> None:
        """Delivers gradients in that dtype, or in any if it is None, as soon as the group is built anew."""
        internals.set_grad_dtype(self.sharded, dtype)
        self.grad_choice = GradDtype(dtype)

    def put_gradient(self, gradient: Tensor | None) -> None:
        """Puts a gradient, which may have another device or dtype, into `.grad` of the sharded parameter."""
        self.sharded.grad = None
        if self.grad_choice is not None:
            internals.set_grad_dtype(self.sharded, self.grad_choice.dtype)
        if gradient is not None:
            self.sharded.grad = gradient.to(self.sharded.device, self.delivered_dtype)

    def adopt(self, found: nn.Parameter) -> None:
        """Takes `found`, which a user has registered in its place, as the sharded parameter. The `grad_dtype`
        stays, unless `found` has one of its own.
        """
        self.grad_choice = internals.chosen_grad_dtype(found) or self.grad_choice
        user_class = _user_class(found)
        if user_class is not nn.Parameter:
            self._user_class = user_class
            if self.unsharded is not NOT_BUILT and internals.holds_values(self.unsharded):
                self.leaf_class = self.unsharded.__class__ = user_class
        elif self._user_class is not nn.Parameter:  # the class stays, and so does what it relies on
            vars(found).update(self._attributes | vars(found))
        if not isinstance(found, DTensor) or not self.distribution.is_of_sharded(found):
            self.sharded = self.cut(found)
        else:
            if found.stride() != contiguous_stride(self.shape):
                # Shards are always contiguous; the object must say so, and stay the one that users hold.
                torch.utils.swap_tensors(found, self._as_sharded(local_of(found).contiguous(), found))
            if type(found) is DTensor:
                found.__class__ = extensions().tensor_class  # type: ignore[assignment]
            self.sharded = found
            self.prepare_gradients(self.local)
            if self.grad_choice is not None:
                self.put_gradient(found.grad)
        self._attributes = vars(self.sharded)
        self._share_attributes(self.unsharded)
        self.register(self.sharded)

    def add_slots(self, slots: list[Slot], name: str) -> None:
        """Registers the sharded parameter in further slots, of which `name` is the first one's FQN."""
        self.slots += slots
        self.names += [name] * len(slots)
        self.register(self.sharded)

    def set_names(self, names: list[str]) -> bool:
        """Takes the FQNs of its first slots, and drops the slots behind them. Returns True if there were any."""
        has_more = len(names) < len(self.slots)
        self.names = names
        del self.slots[len(names) :]
        return has_more

    def register(self, parameter: nn.Parameter) -> None:
        """Puts `parameter` into every slot."""
        for slot in self.slots:
            if slot.is_plain:
                slot.module._parameters[slot.name] = parameter
            else:
                setattr(slot.module, slot.name, parameter)

    # ---- the unsharded parameter

    def build_unsharded(self, memory: Tensor) -> None:
        """Puts the unsharded parameter over `memory`, which has its dtype and the gathered shape.

        It stays the same object if it can, for earlier graphs give it their gradients.
        """
        is_built = self.unsharded is not NOT_BUILT
        if is_built and type(memory) is Tensor and self.unsharded.dtype == memory.dtype:
            self.move_unsharded(memory)
            if self.grad_choice is not None:
                internals.set_grad_dtype(self.unsharded, self.grad_choice.dtype)
            return
        self.unsharded = self.as_unsharded(memory, memory.is_floating_point())
        self.leaf_class = type(self.unsharded)
        internals.hook_sharded(self.unsharded, self)

    def as_unsharded(self, memory: Tensor, requires_grad: bool) -> nn.Parameter:
        """Returns a parameter, as modules compute with, whose data is `memory`, of the gathered shape. It is of the
        user's class, and shows the attributes of the sharded parameter.
        """
        value = memory[0] if self.is_scalar else memory
        parameter: nn.Parameter
        if self._user_class is not nn.Parameter and self._has_user_class():
            parameter = internals.of_class(value, self._user_class, requires_grad)
        else:
            parameter = self.distribution.as_parameter(value, self.shape, requires_grad)
        self._share_attributes(parameter)
        if self.grad_choice is not None:
            internals.set_grad_dtype(parameter, self.grad_choice.dtype)
        return parameter

    def _has_user_class(self) -> bool:
        """Returns True if the unsharded parameter is of the user's class, which does not gather itself."""
        return self._user_class is not nn.Parameter and not gathers_itself(self.local)

    def move_unsharded(self, memory: Tensor | None) -> None:
        """Puts the unsharded parameter over other memory. None: over none, until it is built again."""
        if memory is None:
            value = torch.empty(0, dtype=self.unsharded.dtype, device=self.unsharded.device)
        else:
            value = memory[0] if self.is_scalar else memory
        if isinstance(self.unsharded, DTensor):
            internals.set_local(self.unsharded, value)
        else:
            self.unsharded.data = value

    def _share_attributes(self, unsharded: nn.Parameter) -> None:
        """Shows attributes that users set on `unsharded` or the sharded parameter, now or later, on the other, too."""
        if self.distribution.is_annotated:
            vars(unsharded).update({**_user_attributes(self.sharded), **self.distribution.attributes})
        elif type(unsharded) is nn.Parameter or isinstance(unsharded, DTensor) or self._has_user_class():
            unsharded.__dict__ = vars(self.sharded)
        else:  # its class keeps its inner tensors there
            vars(unsharded).update(_user_attributes(self.sharded))

    def gathered_gradient(self, gradient: Tensor) -> Tensor:
        """Returns a gradient of the unsharded parameter as the ranks of the mesh share it."""
        gradient = self.distribution.gathered_gradient(gradient)
        return gradient.repeat(self.gathered_shape) if self.is_scalar else gradient

    def adopt_gradient(self, returned: Any, device: torch.device) -> Any:
        """Returns, distributed like the sharded parameter, the gradient that a hook has returned: of a plain tensor
        with the parameter's shape this rank's rows; one with the shape of the shard is taken for the shard.

        Raises:
            TypeError: it is no gradient of the parameter.
        """
        if isinstance(returned, DTensor):
            return returned
        if isinstance(returned, Tensor) and returned.shape == self.shape:
            local = self.copy_rows(self.gathered(returned), device)
        elif isinstance(returned, Tensor) and returned.shape == self.local_shape:
            local = returned.to(device)
        else:
            what = f"a tensor of shape {tuple(returned.shape)}" if isinstance(returned, Tensor) else f"{returned!r}"
            raise TypeError(
                f"{self.name}: expected a hook of this parameter to return None, a DTensor or the whole gradient, of "
                f"shape {self.shape}, got {what}. Have it return the whole gradient, or distribute_tensor(whole, "
                "p.device_mesh, p.placements)."
            )
        return internals.new_dtensor(self.tensor_class, local, self.gradient_spec)

    def add_to_gradient(self, accumulated: Any, gradient: Any) -> None:
        """Adds `gradient`, distributed like the sharded parameter, to its `.grad`, which is `accumulated`."""
        if not isinstance(accumulated, DTensor):
            raise TypeError(
                f"{self.name}: expected .grad to be None or a DTensor, got a {type(accumulated).__name__}. Use "
                "distribute_tensor(gradient, p.device_mesh, p.placements)."
            )
        if accumulated.placements != gradient.placements:
            # Computed on shards, with DTensors: not all operations leave it as the parameter is.
            self.sharded.grad = accumulated = accumulated.redistribute(placements=gradient.placements)
        local_of(accumulated).add_(local_of(gradient))
        self.num_added += 1

    def forget_added(self) -> None:
        """Counts from zero how often a gradient is added to an earlier one."""
        self.num_added = 0


def grad_choice(parameter: Tensor, of_policy: torch.dtype | None) -> GradDtype | None:
    """Returns what was chosen as the `grad_dtype` of a parameter: by itself, or by the policy for all."""
    choice = internals.chosen_grad_dtype(parameter)
    if choice is None and of_policy is not None and parameter.is_floating_point():
        return GradDtype(of_policy)
    return choice


def with_grad_dtype(spec: ParamSpec, choice: GradDtype, policy: MixedPrecisionPolicy) -> ParamSpec:
    """Returns `spec` with gradients of the chosen dtype. Those of any dtype are delivered as they are reduced."""
    return replace(spec, grad_dtype=choice.dtype or policy.reduce_dtype, takes_any_dtype=choice.dtype is None)


def _user_class(parameter: Tensor) -> type[Any]:
    """Returns the class that a user has given to a parameter with values in memory of its own; else nn.Parameter."""
    cls = type(parameter)
    return nn.Parameter if cls in internals.PLAIN or not internals.holds_values(parameter) else cls


def _on_device(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """Returns `parameter` on `device` if its class says itself how it is moved there: with the tensors that it needs
    beside its values. Other parameters are moved when they have been cut.
    """
    cls: Any = type(parameter)
    if cls is nn.Parameter or cls.to is Tensor.to or parameter.is_meta or parameter.device == device:
        return parameter
    moved: Any = parameter.to(device) if internals.holds_values(parameter) else None
    if type(moved) is not cls:
        return parameter
    moved.__dict__.update(vars(parameter) | vars(moved))
    internals.take_hooks(parameter, moved)
    return cast(nn.Parameter, moved)


def _user_attributes(parameter: Tensor) -> dict[str, Any]:
    """Returns what users have set on a parameter, without the inner tensors that a tensor subclass keeps there."""
    attributes = vars(parameter)
    if type(parameter) is nn.Parameter or isinstance(parameter, DTensor) or internals.holds_values(parameter):
        return attributes
    own = vars(parameter.detach())
    return {name: value for name, value in attributes.items() if name not in own}
