"""Compares how often optimizers have stepped on a model's sharded parameters, and with what settings.

Each rank steps on its own part of every parameter: one that leaves a step out, or has another learning rate, makes no
error and no mismatch, only weights whose parts are of different models.
"""

from __future__ import annotations

import weakref
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from numbers import Real
from operator import is_
from types import NoneType
from typing import Any, NamedTuple, cast

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..engine.group import FSDPParamGroup
from ..engine.mesh import DataMesh
from ..engine.owners import by_ranks, sharded_owner, some_of
from ..engine.root import Root
from ..ranks.compare_ranks import ComparedNumbers, Comparison, groups_of_all_ranks
from ..torch_private.checks import stepped_on_accumulation
from ..torch_private.dtensor import may_be_empty
from .due import RankCheck, alike, found

# The classes of options whose numbers can't change. A scheduler puts another object in their place.
_UNCHANGING = frozenset({bool, float, int, str, tuple, NoneType})
_MOST_STEPS = 4096


class _Followed:
    """Follows one optimizer: its options in the last step, as bytes, and its steps since ranks last compared them.

    `name`: its class and its sharded parameters. `steps`: for each step that has begun, how many backward passes had
    ended since then. `num_raised`: how many of these have not ended. `loaded`: what `load_state_dict` changes.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.name = weakref.ref(optimizer), _name_of(optimizer)
        self.options: list[Any] = []
        self.encoded = b""
        self.steps: list[int] = []
        self.num_raised, self.loaded = 0, _last_load(optimizer)


class _Told(NamedTuple):
    """What a rank tells others about one optimizer: its steps, see _Followed, and its settings."""

    steps: list[int]
    num_raised: int
    settings: list[list[tuple[str, Any]]]


class StepHistory(RankCheck):
    """Compares the steps that ranks have taken since they last compared them, what gradients are divided by, and
    how often gradients were added to earlier ones.
    """

    def __init__(self) -> None:
        self.count = self.settings = 0
        self._followed: dict[int, _Followed] = {}
        # How many backward passes had ended when ranks last compared their steps.
        self._compared = 0

    def note(self, optimizer: Optimizer, num_backwards: int) -> None:
        """Notes that `optimizer` is about to step, after so many backward passes."""
        followed = self._followed.get(id(optimizer))
        if followed is None or followed.optimizer() is not optimizer:
            followed = self._followed[id(optimizer)] = _Followed(optimizer)
        elif followed.loaded != (loaded := _last_load(optimizer)):
            followed.loaded = loaded
            self._forget()  # what was before all ranks have loaded a checkpoint
        options = [value for group in optimizer.param_groups for name, value in group.items() if name != "params"]
        self.count += 1
        encoded = followed.encoded
        if len(options) != len(followed.options) or not all(map(is_, options, followed.options)):
            encoded = f"{followed.name}{_settings_of(optimizer)!r}".encode()
            is_unchanging = _UNCHANGING.issuperset(map(type, options))
            followed.options, followed.encoded = (options, encoded) if is_unchanging else ([], b"")
        self.settings = zlib.crc32(encoded, self.settings)
        if len(followed.steps) < _MOST_STEPS:
            followed.steps.append(num_backwards - self._compared)
        followed.num_raised += 1

    def note_end(self, optimizer: Optimizer) -> None:
        """Notes that the step of `optimizer` has not raised."""
        followed = self._followed.get(id(optimizer))
        if followed is not None and followed.num_raised:
            followed.num_raised -= 1

    def optimizers(self) -> list[Optimizer]:
        """Returns the optimizers that have stepped, and are alive."""
        return [optimizer for each in self._followed.values() if (optimizer := each.optimizer()) is not None]

    def out_of_step(self, root: Root) -> None:
        self._take(root)
        _take_added(root)

    def _forget(self) -> None:
        self.count = self.settings = 0
        for each in self._followed.values():
            each.steps.clear()
            each.num_raised = 0

    def _take(self, root: Root) -> tuple[int, dict[str, _Told]]:
        """Begins anew. Returns when ranks last compared steps, and what this rank has to tell of each optimizer."""
        told: dict[str, _Told] = {}
        for key, each in [*self._followed.items()]:
            optimizer = each.optimizer()
            steps, num_raised, _ = told.get(each.name, ([], 0, []))
            settings = [] if optimizer is None else _settings_of(optimizer)
            told[each.name] = _Told(steps + each.steps, num_raised + each.num_raised, settings)
            if optimizer is None:
                del self._followed[key]
        since, self._compared = self._compared, root.num_backwards
        self._forget()
        return since, told

    def numbers(self, comparison: Comparison) -> Iterator[tuple[DataMesh, ComparedNumbers]]:
        mesh = comparison.mesh
        if mesh is None or mesh.num_ranks == 1 or comparison.number == 1:
            return
        root = comparison.root
        raised = sum([each.num_raised for each in self._followed.values()])
        numbers = (self.count, raised, self.settings)
        since, told = self._take(root)
        yield alike("optimizer steps", mesh, lambda: told, lambda of_ranks: _difference(of_ranks, since), numbers)
        added = _take_added(root)
        yield alike("gradients", mesh, lambda: added, _added_apart, [sum(added.values())])


def note_step(optimizer: Optimizer, groups: Sequence[FSDPParamGroup], in_backward: bool) -> None:
    """Notes that `optimizer` is about to step on parameters of `groups`, which ranks compare the next time.

    `in_backward`: it steps on a few parameters at a time, which ranks do not compare.
    """
    root = groups[0].root
    history = root.events.of(StepHistory)
    if history is not None and not in_backward:
        history.note(optimizer, root.num_backwards)


def note_end_of_step(optimizer: Optimizer, groups: Sequence[FSDPParamGroup]) -> None:
    """Notes that a step on parameters of `groups` has ended without an error: only such a step counts as done."""
    history = groups[0].root.events.of(StepHistory)
    if history is not None:
        history.note_end(optimizer)


def _last_load(optimizer: Optimizer) -> int:
    """Returns another number behind `load_state_dict`, which replaces the list of parameter groups. A flat optimizer
    makes its dict of states anew when that is read.
    """
    return id(optimizer.param_groups)


def _take_added(root: Root) -> dict[str, int]:
    """Returns how often gradients of a parameter were added to earlier ones since this was called last, by the name of
    the parameter; of those of which each rank has rows, in groups that all ranks use.
    """
    params = [param for group in groups_of_all_ranks(root) for param in group.params if param.num_added]
    added = {param.name: param.num_added for param in params if not may_be_empty(cast(DTensor, param.sharded))}
    for param in params:
        param.forget_added()
    return added if root.stepper is None else {}  # steps in backward clear gradients, perhaps in another thread


def _added_apart(of_ranks: Mapping[int, Mapping[str, int]]) -> str:
    """Returns what differs between ranks. `of_ranks`: rank -> what `_take_added` has returned."""
    names = dict.fromkeys(name for added in of_ranks.values() for name in added)
    counts = {name: {rank: added.get(name, 0) for rank, added in of_ranks.items()} for name in names}
    apart = [name for name, each in counts.items() if len({*each.values()}) > 1]
    return (
        f"{some_of(apart)}: since ranks last compared, a backward has added its gradient to that of an earlier one "
        f"{_by_count(counts[apart[0]])}, so each rank's part is of another model now. Call zero_grad() on all ranks, "
        "at the same place of each step, and load a checkpoint of before."
    )


def _name_of(optimizer: Optimizer) -> str:
    """Returns the class of an optimizer, and its sharded parameters. Others may be a rank's own (experts, FSDP1's)."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    owners = [sharded_owner(param) for param in params if isinstance(param, DTensor)]
    names = [owner.param.name for owner in owners if owner is not None]
    return f"{type(optimizer).__name__} of {some_of(names)}"


def _settings_of(optimizer: Optimizer) -> list[list[tuple[str, Any]]]:
    """Returns the numbers among the options of each of its parameter groups."""
    return [
        sorted((name, value) for name, value in map(_as_number, group.items()) if value is not None)
        for group in optimizer.param_groups
    ]


def _as_number(option: tuple[str, Any]) -> tuple[str, Any]:
    name, value = option
    if type(value) is Tensor and value.numel() == 1 and value.device.type == "cpu":  # elsewhere the host would wait
        return name, value.item()
    several = value if isinstance(value, (tuple, list)) and name != "params" else (value,)
    return name, tuple(map(float, several)) if all(isinstance(each, Real) for each in several) else None


def _difference(of_ranks: Mapping[int, Mapping[str, _Told]], since: int) -> str:
    """Returns what differs between ranks. `of_ranks`: rank -> what it tells of each optimizer, by its name.

    `since`: after how many backward passes ranks last compared their steps.
    """
    apart = "so each rank's part is of another model now. Have all ranks"
    for name in dict.fromkeys(name for told in of_ranks.values() for name in told):
        raised = {rank: told[name].num_raised if name in told else 0 for rank, told in of_ranks.items()}
        if len({*raised.values()}) > 1:
            return (
                f"{name}: a step of this optimizer has raised an error {_by_count(raised)}, since ranks compared steps "
                f"after backward pass {since} of the model. The other ranks have stepped, and a step that raises may "
                f"have changed some parameters, {apart} stop when one of them raises there, and load a checkpoint of "
                "before."
            )
        steps = {rank: Counter(told[name].steps if name in told else ()) for rank, told in of_ranks.items()}
        times = sorted({number for each in steps.values() for number in each})
        first = next((number for number in times if len({each[number] for each in steps.values()}) > 1), None)
        if first is not None:
            counts = {rank: each.total() for rank, each in steps.items()}
            of_first = {rank: each[first] for rank, each in steps.items()}
            return (
                f"{name}: this optimizer has stepped {_by_count(counts)}, since ranks compared steps after backward "
                f"pass {since} of the model; the first difference is behind backward pass {since + first} "
                f"({_by_count(of_first)}), {apart} decide alike whether to step (all-reduce what that depends on), and "
                "load a checkpoint of before."
            )
    what = _option_apart(of_ranks) or f"{some_of(next(iter(of_ranks.values())))}: some settings were others in a step"
    return (
        f"{what}, since ranks compared steps after backward pass {since} of the model: optimizers have stepped with "
        f"other settings on some rank than on others (lr, of a scheduler that follows each rank's own loss?), {apart} "
        "choose alike (all-reduce what that depends on), and load a checkpoint of before."
    )


def _by_count(counts: Mapping[int, int]) -> str:
    """Returns for each count the ranks that have it."""
    return by_ranks({rank: f"{count} time{'s' * (count != 1)}" for rank, count in counts.items()})


def _option_apart(of_ranks: Mapping[int, Mapping[str, _Told]]) -> str:
    """Names an option that differs between ranks now, and its optimizer."""
    first, *others = of_ranks
    for name, ours in of_ranks[first].items():
        for other in others:
            theirs = of_ranks[other].get(name, ours)
            for i, (group, of_other) in enumerate(zip(ours.settings, theirs.settings, strict=False)):
                for option, value in group:
                    there = dict(of_other).get(option)
                    if value != there:
                        return (
                            f"{name}: {option} of parameter group {i} is {_shown(value)} on rank {first} and "
                            f"{_shown(there)} on rank {other}"
                        )
    return ""


def _shown(value: Any) -> str:
    return str(value[0]) if isinstance(value, tuple) and len(value) == 1 else str(value)


class Divisors(RankCheck):
    """Compares what gradients are divided by, between ranks, and between groups on one mesh."""

    def numbers(self, comparison: Comparison) -> Iterator[tuple[DataMesh, ComparedNumbers]]:
        mesh, root = comparison.mesh, comparison.root
        if mesh is not None:
            divisors = [group.settings.divide_factor for group in root.groups]
            yield alike("divisors", mesh, lambda: divisors, lambda _: f"{root.state}: {_OF_RANKS}")
            apart = _divided_apart(root)
            yield found("divisors of groups", mesh, apart and _OF_GROUPS.format(apart))


_OF_RANKS = (
    "gradients are divided by other numbers on some rank than on others. Call set_gradient_divide_factor on all ranks, "
    "with the same factor."
)
_OF_GROUPS = (
    "The gradients of one model are divided in several ways ({}), which scales some of them against others. Call "
    "model.set_gradient_divide_factor(factor, recurse=True) on the root, or give each sharded module the same factor."
)


def _divided_apart(root: Root) -> str:
    """Returns the groups on one mesh that have several divisors. Groups on other meshes, of experts for example, may
    have their own, and so may frozen ones.
    """
    of_mesh: dict[Any, dict[float, list[str]]] = {}
    for group in root.groups:
        factor, mesh = group.settings.divide_factor, group.mesh
        if factor is not None or any(param.sharded.requires_grad for param in group.params):
            axes = mesh.mesh, frozenset(mesh.shard_axes + mesh.replicate_axes)
            of_mesh.setdefault(axes, {}).setdefault(factor or mesh.num_ranks, []).append(group.name)
    apart = [each for each in of_mesh.values() if len(each) > 1]
    return ", ".join(f"{some_of(names)} by {divisor:g}" for each in apart for divisor, names in each.items())


class OptimizersOnAccumulation(RankCheck):
    """Refuses torch's `_apply_optimizer_in_backward`, which steps where autograd accumulates a parameter's gradient."""

    def numbers(self, comparison: Comparison) -> Iterator[tuple[DataMesh, ComparedNumbers]]:
        stepped, mesh = stepped_on_accumulation(), comparison.mesh
        params = (param for group in comparison.root.groups if stepped for param in group.params)
        name = next((param.name for param in params if param.sharded in stepped), "")
        if mesh is not None:
            yield found("optimizers in backward", mesh, name and f"{name}: {_NEVER_STEPS}")


_NEVER_STEPS = (
    "_apply_optimizer_in_backward would never step, for gradients of sharded parameters come from reductions, not from "
    "autograd. Call model.set_optimizer_in_backward(optimizer), or step in register_post_accumulate_grad_hook of each "
    "parameter."
)
