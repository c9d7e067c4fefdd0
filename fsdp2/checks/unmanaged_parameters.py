"""Finds trainable parameters that no group manages: each rank trains them with its own gradient.

Those that were the same on all ranks must stay so: they do if the user averages gradients, or broadcasts them. They are
in a sharded module, or outside of it, in a loss for example, and then an optimizer has them.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import count

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..engine.events import Observer
from ..engine.group import FSDPParamGroup
from ..engine.mesh import DataMesh
from ..engine.owners import names_of_unsharded, outermost_of_thread, sharded_owner, some_of
from ..engine.parameter import fqn
from ..engine.root import Root
from ..parameters.checksum import checksum, joint_checksum, read
from ..ranks.compare_ranks import ComparedNumbers, Comparison
from ..torch_private.checks import is_sharded_by_fsdp1
from ..torch_private.internals import graph_task
from .due import RankCheck, alike, found

_MOST_GRADIENTS = 16


class UnmanagedParameters(RankCheck):
    """Compares checksums of unmanaged parameters between ranks."""

    def __init__(self) -> None:
        # Those that were there when ranks last compared them, and those of them that were the same on all ranks.
        self._known: set[str] = set()
        self._common: set[str] = set()
        # Plain parameters outside of the model that optimizers step on, by what errors call them.
        self._plain: dict[str, _PlainParameter] = {}
        self._backwards = _Backwards(self._plain)

    def note_plain(self, root: Root, optimizer: Optimizer, params: Mapping[int, Tensor], is_beside: bool) -> None:
        """Notes plain parameters (number -> parameter) on which an optimizer is about to step first.

        `is_beside`: it steps on sharded parameters, too. Else they count once they have got gradients by a backward
        pass of the root.
        """
        kind = type(optimizer).__name__
        for i, param in params.items():
            name = usual = f"parameter {i} of {kind}, of shape {tuple(param.shape)}"
            for number in count(2):
                if name not in self._plain:
                    break
                name = f"{usual} (optimizer {number})"
            self._plain[name] = _PlainParameter(optimizer, i, param, is_beside)
        root.remove(self._backwards)
        if self._backwards.are_awaited():
            root.add(self._backwards)

    def detached(self, root: Root) -> None:
        root.remove(self._backwards)
        for each in self._plain.values():
            each.ignore_gradients()

    def numbers(self, comparison: Comparison) -> Iterator[tuple[DataMesh, ComparedNumbers]]:
        mesh = comparison.mesh
        if mesh is None or mesh.num_ranks == 1:
            return
        unmanaged = dict(_find_unmanaged(comparison.root))
        trained = {name: each for name, each in self._plain.items() if each.is_trained}
        yield found("replaced modules", mesh, _replaced_module(unmanaged, comparison.root))
        late = set() if comparison.number == 1 else set(unmanaged) - self._known

        def tell() -> dict[str, tuple[int, bool]]:
            sums = read([checksum(parameter) for parameter in unmanaged.values()])
            return {name: (value, name in self._common | late) for name, value in zip(unmanaged, sums, strict=True)}

        def explain(of_ranks: Mapping[int, Mapping[str, tuple[int, bool]]]) -> str:
            names = dict.fromkeys(name for told in of_ranks.values() for name in told)
            must_be = {name for told in of_ranks.values() for name, (_, must) in told.items() if must}
            common = {name for name in names if len({told.get(name, (None,))[0] for told in of_ranks.values()}) == 1}
            apart = [name for name in names if name in must_be - common]
            if not apart:
                self._common, self._known = common.intersection(unmanaged), set(unmanaged)
                return ""
            return (
                f"{some_of(apart)}: no fully_shard call manages it. It was the same on all ranks, or has come since, "
                "and is not the same: each rank trains it with its own gradient. Have it there before fully_shard, and "
                "out of ignored_params; or freeze it, or average its gradient before each step."
            )

        def settle(differs: bool) -> None:
            if not differs:
                self._common = self._known = set(unmanaged)

        numbers = [zlib.crc32(repr([*unmanaged]).encode()), joint_checksum(unmanaged.values())]
        yield alike("unmanaged parameters", mesh, tell, explain, numbers, settle)
        numbers = [zlib.crc32(repr([*trained]).encode()), joint_checksum([each.now() for each in trained.values()])]
        yield alike("plain parameters", mesh, self._tell_plain, _explain_plain, numbers)

    def _tell_plain(self) -> dict[str, tuple[int, int, bool]]:
        """Returns the checksums of plain parameters before the first step and now, and if they are trained."""
        values = read([value for each in self._plain.values() for value in (each.before, checksum(each.now()))])
        pairs = zip(self._plain.items(), values[::2], values[1::2], strict=True)
        return {name: (before, now, each.is_trained) for (name, each), before, now in pairs}


def _explain_plain(of_ranks: Mapping[int, Mapping[str, tuple[int, int, bool]]]) -> str:
    apart = []
    for name in next(iter(of_ranks.values())):
        of_name = [each[name] for each in of_ranks.values() if name in each]
        befores, nows, trained = zip(*of_name, strict=True)
        if len(of_name) == len(of_ranks) and len({*befores}) == 1 and len({*nows}) > 1 and any(trained):
            apart.append(name)
    if not apart:
        return ""
    return (
        f"{some_of(apart)}: no fully_shard call manages it. It was the same on all ranks, and is not any more: each "
        "rank has trained it with its own gradient. Apply fully_shard to the module around it; or freeze it, or "
        "average its gradient before each step."
    )


class _PlainParameter:
    """Follows a plain parameter that an optimizer steps on: whether it is trained together with a sharded model.

    `before`: its checksum before the optimizer's first step. `is_trained`: it has got a gradient by a backward pass of
    the root. `is_open`: that is not known yet.
    """

    def __init__(self, optimizer: Optimizer, index: int, param: Tensor, is_trained: bool) -> None:
        self.is_trained, self.before = is_trained, checksum(param)
        # Not of the parameter: torch swaps no tensor that has a weak reference.
        self._optimizer, self._index, self._shape = weakref.ref(optimizer), index, param.shape
        self._gradients, self._tasks = 0, set[int]()
        # One that is frozen by now, and has a gradient of before, gets no more.
        is_followed = not is_trained and param.requires_grad
        self._handle = param.register_post_accumulate_grad_hook(self._note_gradient) if is_followed else None

    @property
    def is_open(self) -> bool:
        return self._handle is not None

    def now(self) -> Tensor:
        """Returns the parameter; an empty tensor if it is gone."""
        optimizer = self._optimizer()
        params = [] if optimizer is None else [each for group in optimizer.param_groups for each in group["params"]]
        param = params[self._index] if self._index < len(params) else None
        if isinstance(param, Tensor) and param.shape == self._shape:
            return param
        return self.before.new_empty(0)

    def _note_gradient(self, _: Tensor) -> None:
        self._tasks.add(graph_task())
        self._gradients += 1
        if self._gradients >= _MOST_GRADIENTS:
            self.ignore_gradients()

    def note_backward(self, task: int) -> None:
        """Notes that a backward pass of the root ends, which is autograd's number `task`."""
        if task in self._tasks:
            self.is_trained = True
            self.ignore_gradients()

    def ignore_gradients(self) -> None:
        """Follows its gradients no more."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


class _Backwards(Observer):
    """Notes backward passes of a root while it is not known with which model some plain parameters train."""

    def __init__(self, params: Mapping[str, _PlainParameter]) -> None:
        self._params = params

    def are_awaited(self) -> bool:
        """Returns True while that is so."""
        return any(each.is_open for each in self._params.values())

    def backward_ended(self, root: Root) -> None:
        assert root.backward is not None, "it ends"
        for each in self._params.values():
            each.note_backward(root.backward.task)
        if not self.are_awaited():
            root.remove(self)


def note_plain(optimizer: Optimizer, groups: Sequence[FSDPParamGroup], params: Mapping[int, Tensor]) -> None:
    """Notes that `optimizer` is about to step on these plain parameters (number -> parameter) for the first time.

    `groups`: those of sharded parameters on which it steps, too. If there are none, any model of this thread may train
    with it.
    """
    params = {number: param for number, param in params.items() if not is_sharded_by_fsdp1(param)}
    roots = [groups[0].root] if groups else [state.root for state in outermost_of_thread()]
    for root in roots:
        check = root.events.of(UnmanagedParameters)
        if check is not None:
            check.note_plain(root, optimizer, params, is_beside=bool(groups))


def _replaced_module(unmanaged: Mapping[str, nn.Parameter], root: Root) -> str:
    """Returns an error if an unmanaged parameter has the name of one that is managed, in a module that was there."""
    managed = {name: param for group in root.groups for param in group.params for name in param.names}
    for name, parameter in unmanaged.items():
        if name in managed:
            return (
                f"{name}: the module around it was replaced after fully_shard, which manages the parameter of shape "
                f"{managed[name].shape} that was there; each rank would train the new one, of shape "
                f"{tuple(parameter.shape)}, with its own gradient. Replace or resize modules before fully_shard; or "
                "build the model anew with the new one, apply fully_shard, and load the rest."
            )
    return ""


def _find_unmanaged(root: Root) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields trainable parameters below the root's modules that no group has, with their names. A module that has come
    later, sharded by itself, is its own root.
    """
    managed = {(slot.module, slot.name) for group in root.groups for param in group.params for slot in param.slots}
    for outer in root.state.modules:
        for prefix, module in outer.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is None or not parameter.requires_grad or (module, name) in managed:
                    continue
                if names_of_unsharded(parameter) or is_sharded_by_fsdp1(parameter):
                    continue
                if not isinstance(parameter, DTensor) or sharded_owner(parameter) is None:
                    yield fqn(prefix, name), parameter
