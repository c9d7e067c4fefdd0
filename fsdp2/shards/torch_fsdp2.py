"""The protocol for modules that torch's own FSDP2 has sharded, from what DTensors and its public methods say.

Nothing is imported from torch.distributed.fsdp: where no program has, no module can be sharded by it. A group is what
one `fully_shard` call of torch has got: the DTensors in its modules that are in no deeper sharded module.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from ..torch_private.internals import graph_task, local_of
from .dtensors import box_of, cuts_of, device_of_kind, replicas_of
from .gathers import gather_whole
from .protocol import Cut, GroupFacts, NotedValues, Place, Ranks, ShardGroup, ShardParam

__all__ = ["TorchGroup", "TorchParam", "TorchShards", "is_sharded_by_torch"]


class _Refusal:
    """The hook by which a sharded module refuses to run while its slots hold copies. `name`: FQN of its group."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_: Any) -> None:
        raise RuntimeError(
            f"{self._name}: its parameters are copies that full_params has made, with which no sharded module runs. "
            "Leave that block first."
        )


def _refuses(module: nn.Module) -> bool:
    """Returns True while the slots of a sharded module hold copies."""
    return any(isinstance(hook, _Refusal) for hook in module._forward_pre_hooks.values())


def is_sharded_by_torch(module: nn.Module) -> bool:
    """Returns True if torch's own fully_shard was applied to `module`."""
    if "torch.distributed.fsdp" not in sys.modules:
        return False
    return any(
        cls.__name__ == "FSDPModule" and cls.__module__.startswith("torch.distributed.") for cls in type(module).__mro__
    )


def _state_of(module: nn.Module) -> object:
    """Returns what the modules of one fully_shard call have in common; the module, where torch does not tell."""
    state_of = getattr(sys.modules["torch.distributed.fsdp"].fully_shard, "state", None)
    try:
        found = None if state_of is None else state_of(module)
    except (AssertionError, AttributeError, KeyError, RuntimeError):  # another API of torch, or patch_torch() since
        found = None
    return module if found is None else found


def plain_class(module: nn.Module) -> type[nn.Module]:
    """Returns the class that a module had before torch's FSDP2 sharded it."""
    classes = type(module).__mro__
    return classes[[cls.__name__ for cls in classes].index("FSDPModule") + 1]


class TorchParam:
    """One parameter of torch's FSDP2, see ShardParam; or any DTensor, which then has no names, no slots and no group
    but itself.
    """

    def __init__(self, parameter: DTensor, group: TorchGroup | None = None) -> None:
        self.parameter = cast(nn.Parameter, parameter)
        self._names: list[str] = []
        self.slots: list[tuple[nn.Module, str]] = []
        if group is None:
            group = TorchGroup(parameter, "")
            group.params.append(self)
        self.group = group

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TorchParam) and other.parameter is self.parameter

    def __hash__(self) -> int:
        return id(self.parameter)

    def __repr__(self) -> str:
        return f"<{self.name}: {self.shape} by torch's FSDP2>"

    @property
    def names(self) -> Sequence[str]:
        return self._names or [f"a parameter of shape {self.shape}"]

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def registered(self) -> Tensor:
        module, name = self.slots[0] if self.slots else (nn.Module(), "")
        found = module._parameters.get(name)
        return found if isinstance(found, DTensor) else self.parameter

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.parameter.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.parameter.dtype

    @property
    def local(self) -> Tensor:
        return local_of(self.parameter)

    @property
    def grad(self) -> Tensor | None:
        grad = self.parameter.grad
        return local_of(grad) if isinstance(grad, DTensor) else grad

    @property
    def is_unsynchronized(self) -> bool:
        return False

    @property
    def version(self) -> int:
        pair = self.parameter, self.local
        return sum(0 if each.is_inference() else each._version for each in pair)

    @property
    def cuts(self) -> Sequence[Cut]:
        return cuts_of(self.name, self._dtensor.device_mesh, self._dtensor.placements, self.shape)

    @property
    def replicas(self) -> Sequence[dist.ProcessGroup]:
        return replicas_of(self.parameter)

    @property
    def box(self) -> tuple[slice, ...]:
        return box_of(self.cuts, self.shape)

    @property
    def place(self) -> Place | None:
        return None

    @property
    def gathers_itself(self) -> bool:
        return hasattr(self.local, "fsdp_pre_all_gather")

    @property
    def is_stepped_in_backward(self) -> bool:
        return False

    @property
    def _dtensor(self) -> DTensor:
        return cast(DTensor, self.parameter)

    def part_of(self, value: Tensor) -> Tensor:
        return value[self.box] if self.shape else value

    def as_parameter(self, value: Tensor) -> nn.Parameter:
        return nn.Parameter(value, requires_grad=False)

    def register(self, parameter: nn.Parameter) -> None:
        for module, name in self.slots:
            module._parameters[name] = parameter

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty_like(self.parameter, device=device)


class TorchGroup:
    """What one fully_shard call of torch has sharded, see ShardGroup."""

    def __init__(self, state: object, name: str) -> None:
        self._state, self.name = state, name or "root"
        self.modules: list[nn.Module] = []
        self.module_names: list[str] = []
        self.params: list[TorchParam] = []
        # A parameter on its mesh, if it has none of its own.
        self.like: TorchParam | None = None
        self._refusals: list[RemovableHandle] = []

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TorchGroup) and other._state is self._state

    def __hash__(self) -> int:
        return id(self._state)

    def __repr__(self) -> str:
        return self.name

    @property
    def is_root(self) -> bool | None:
        known: bool | None = getattr(self._state, "_is_root", None)
        return known

    @property
    def ranks(self) -> Ranks:
        like = self.params[0] if self.params else self.like
        if like is None:
            return Ranks(torch.device("cpu"), (), frozenset([dist.get_rank()]), 1, True)
        tensor = cast(DTensor, like.parameter)
        mesh, device = tensor.device_mesh, device_of_kind(tensor.device_mesh.device_type)
        axes = [axis for axis in range(mesh.ndim) if mesh.size(axis) > 1]
        num_shards = 1
        for axis in axes:
            num_shards *= 1 if tensor.placements[axis].is_replicate() else mesh.size(axis)
        return Ranks(
            device=device,
            axis_groups=tuple(mesh.get_group(axis) for axis in axes),
            members=frozenset(mesh.mesh.flatten().tolist()),
            num_shards=num_shards,
            is_first=not any(mesh.get_local_rank(axis) for axis in axes),
        )

    is_foreign = True

    @property
    def in_use(self) -> str | None:
        if any(map(_refuses, self.modules)):
            return "copies"
        return "backward" if graph_task() != -1 else None

    def settle(self, *, reshard: bool = True, may_be_meta: bool = True, may_be_untied: bool = False) -> None:
        if reshard:
            for module in self.modules:
                cast(Any, module).reshard()
        on_meta = [param.name for param in self.params if param.local.is_meta]
        if on_meta and not may_be_meta:
            raise RuntimeError(
                f"{on_meta[0]} is on meta: it has no values. Call model.to_empty(device=...), and initialise or load."
            )

    input_dtype = None
    settings_text = ""

    def find_computed(self) -> tuple[torch.dtype, ...]:
        found: dict[torch.dtype, None] = {}
        for module in self.modules:
            cast(Any, module).unshard()
        for param in self.params:
            for module, name in param.slots[:1]:
                unsharded = module._parameters.get(name)
                assert unsharded is not None, "it has just been registered"
                found[unsharded.dtype] = None
        self.settle()
        return tuple(found)

    def facts(self) -> GroupFacts:
        params = self.params
        return GroupFacts(
            cls=plain_class(self.modules[0]).__name__,
            modules=tuple(self.module_names),
            parameters=tuple(param.name for param in params),
            num_frozen=sum(not param.parameter.requires_grad for param in params),
            numel=sum(param.parameter.numel() for param in params),
            stored=tuple(dict.fromkeys(param.dtype for param in params)),
            computed=None,
            reduced=None,
            sent=None,
            gathered_nbytes=None,
            reduced_nbytes=None,
            padding_nbytes=sum(map(_padding_nbytes, params)),
            settings=None,
        )

    def before_read(self) -> None:
        """Does nothing: torch's FSDP2 has no copies of shards on their way between steps."""

    def versions(self) -> tuple[int, ...]:
        return tuple(param.version for param in self.params)

    def copy_whole(self, params: Sequence[ShardParam] | None = None, dtype: torch.dtype | None = None) -> list[Tensor]:
        chosen = [*(self.params if params is None else params)]
        with torch.inference_mode(False), torch.no_grad():
            values = [param.local.detach() for param in chosen]
            if dtype is not None:
                values = [each.to(dtype) if each.is_floating_point() else each for each in values]
            return gather_whole(values, [param.cuts for param in chosen], self.ranks.device)

    def note_loaded(self) -> None:
        """Does nothing: torch's FSDP2 compares nothing between ranks."""

    def noted_values(self) -> Sequence[NotedValues]:
        return []

    def begin_copies(self) -> None:
        self._refusals = [
            module.register_forward_pre_hook(_Refusal(self.name), prepend=True) for module in self.modules
        ]

    def end_copies(self) -> None:
        while self._refusals:
            self._refusals.pop().remove()

    unsharded = None


class TorchShards:
    """The parameters in a module that torch's FSDP2 has sharded, see Shards.

    Where a forward has left some unsharded, it reshards them: only sharded parameters are DTensors.
    """

    def __init__(self, module: nn.Module) -> None:
        self._found: dict[int, TorchParam] = {}
        groups: dict[int, TorchGroup] = {}
        entries = [(each, prefix, sharded) for each, prefix, sharded in _walk(module, "", None, set()) if sharded]
        for each, _, sharded in entries:
            is_plain = any(type(tensor) is nn.Parameter for tensor in each._parameters.values())
            if is_plain and graph_task() == -1 and not _refuses(sharded):
                cast(Any, sharded).reshard()
        for each, prefix, sharded in entries:
            state = _state_of(sharded)
            group = groups.setdefault(id(state), TorchGroup(state, prefix))
            if each is sharded:
                group.modules.append(each)
                group.module_names.append(prefix or "root")
            parameters: dict[str, Any] = each._parameters
            for name, tensor in parameters.items():
                if isinstance(tensor, DTensor):
                    if id(tensor) not in self._found:
                        self._found[id(tensor)] = TorchParam(tensor, group)
                        group.params.append(self._found[id(tensor)])
                    self._found[id(tensor)].slots.append((each, name))
        for name, found in module.named_parameters(remove_duplicate=False):
            if id(found) in self._found:
                self._found[id(found)]._names.append(name)
        self.groups: Sequence[ShardGroup] = [*groups.values()]
        for group in groups.values():
            group.like = next(iter(self._found.values()), None)

    def names(self) -> dict[str, ShardParam]:
        return {name: param for param in self._found.values() for name in param.names}

    def find(self, tensor: Tensor) -> ShardParam | None:
        return self._found.get(id(tensor))

    def unwritten(self) -> Sequence[Tensor]:
        return []

    def note_emptied(self, buffers: Sequence[Tensor]) -> None:
        """Does nothing: torch's FSDP2 does not look at buffers."""

    def frozen_writes(self) -> dict[str, bool]:
        return {}

    def finish_gradients(self) -> None:
        """Does nothing: torch's FSDP2 has finished when backward returns."""

    def drop(self, after_error: bool) -> None:
        for group in self.groups if after_error else ():
            for module in group.modules:
                begin_anew = getattr(module, "reset_iter_state", None)
                if begin_anew is not None:
                    with suppress(RuntimeError):  # a module that is no root
                        begin_anew()
                cast(Any, module).reshard()


def _walk(
    module: nn.Module, prefix: str, sharded: nn.Module | None, seen: set[nn.Module]
) -> Iterator[tuple[nn.Module, str, nn.Module | None]]:
    """Yields each module, its FQN, and the innermost sharded module that it is in, or is."""
    if module in seen:
        return
    seen.add(module)
    sharded = module if is_sharded_by_torch(module) else sharded
    yield module, prefix, sharded
    for name, child in module._modules.items():
        if child is not None:
            yield from _walk(child, f"{prefix}.{name}" if prefix else name, sharded, seen)


def _padding_nbytes(param: ShardParam) -> int:
    """Returns the bytes of padding in one gather of a parameter: all ranks send chunks of one size."""
    (cut,) = list(param.cuts)[:1] or (None,)
    return 0 if cut is None else (cut.chunk_numel * cut.size - math.prod(cut.shape)) * param.dtype.itemsize
