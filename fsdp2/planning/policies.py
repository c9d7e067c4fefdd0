"""Turns a wrap policy into the modules to shard, bottom-up, with tied parameters in one group (`wrap_groups`)."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Any

from torch import Tensor, nn

from ..engine.state import modules_below, require_module
from ..shards.find import is_sharded
from ..torch_private.plans import NO_SPLIT, RUN_POLICY

__all__ = ["WrapGroup", "wrap_groups"]

Chosen = dict[nn.Module, dict[str, Any]]
# Arguments of fully_shard that a policy may choose for a module.
OPTIONS = ("reshard_after_forward", "mp_policy", "offload_policy")
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
# Its forward reads the weights of its submodules without calling them.
_WHOLE = (nn.MultiheadAttention,)


@dataclass(frozen=True)
class WrapGroup:
    """The modules of one `fully_shard` call, and its arguments.

    Args:
        name: FQN of the first module.
        modules: one module, or several that share parameters.
        options: arguments of `fully_shard` that the policy has chosen for them, by name.
    """

    name: str
    modules: tuple[nn.Module, ...]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def module(self) -> nn.Module | list[nn.Module]:
        """The first argument of `fully_shard`: the module, or the list of modules."""
        return self.modules[0] if len(self.modules) == 1 else [*self.modules]


def wrap_groups(model: nn.Module, policy: Any = None) -> list[WrapGroup]:
    """Returns the modules that a wrap policy chooses, bottom-up: in the order of their `fully_shard` calls.

    The model itself is not among them: shard it last. It does not communicate, and changes nothing. If a policy matches
    nothing, as one by size in a small model, a warning says so, and the list is empty; names of classes that match
    nothing are an error.

    Args:
        model: a module that is not sharded yet, on any device, also on meta.
        policy: what to shard.

            - a class of modules, a name of a class, or a collection of them;
            - a dict from such classes to the arguments of `fully_shard` for their modules (`reshard_after_forward`,
              `mp_policy`, `offload_policy`);
            - a number: modules of at least so many parameter elements that no module inside has already;
            - a function of a module, or of its FQN and the module. It returns a bool, or a dict of such arguments;
            - torch's `ModuleWrapPolicy` or `CustomPolicy`, `size_based_auto_wrap_policy`,
              `transformer_auto_wrap_policy` and other functions of `module, recurse, nonwrapped_numel`, also as
              functools.partial;
            - None: the classes that the model names in `_no_split_modules`, as models of Transformers do; else the
              classes that a ModuleList or Sequential repeats.

    Modules without parameters, and containers without a forward (ModuleList), are left out. Modules that share a
    parameter get one group, as one call on a list; if one of them is inside the other, or is the model, the inner one
    is left to the outer one.

    Raises:
        TypeError: `model` is no module, or the policy has another type or returns one.
        ValueError: it names classes that the model does not have, or unknown arguments; the model is sharded already.

    Example:
        ```python
        for group in fsdp2.wrap_groups(model, policy={Block}):
            fully_shard(group.module, **group.options)
        fully_shard(model)
        ```
    """
    require_module("model", model, "wrap_groups")
    sharded = [name or "the model" for module, name in modules_below(model).items() if is_sharded(module)]
    if sharded:
        raise ValueError(f"model: expected plain modules, but {sharded[0]} is sharded. Plan before fully_shard.")
    chosen = {
        module: dict(options)
        for module, options in _choose(model, policy).items()
        if module is not model and not isinstance(module, _CONTAINERS) and any(True for _ in module.parameters())
    }
    for module, options in chosen.items():
        _check_options(modules_below(model)[module], options)
    if policy is not None and not chosen:
        what = (
            f"policy: {_text(policy)} matches no module of {type(model).__name__}. Its classes with parameters are "
            f"{', '.join(_classes_in(model)) or 'none'}."
        )
        if _has_names(policy):
            raise ValueError(what)
        warnings.warn(f"{what} So fully_shard(model) makes one group of all.", stacklevel=2)
    return _tie(model, chosen)


def _has_names(policy: Any) -> bool:
    """Returns True if a policy names classes, or nothing at all, so that a policy without a match is a mistake."""
    named = [policy] if isinstance(policy, str) else policy
    return isinstance(named, Collection) and (not named or any(isinstance(each, str) for each in named))


# ---- which modules


def _choose(model: nn.Module, policy: Any) -> Chosen:
    if policy is None:
        names = getattr(model, NO_SPLIT, None)
        found = _of_classes(model, {each: {} for each in names}) if names else {}
        return found or _repeated(model)
    if isinstance(policy, bool) or (isinstance(policy, (int, float)) and policy <= 0):
        raise ValueError(f"policy: expected a number of elements above 0, got {policy!r}")
    if isinstance(policy, (int, float)):
        return _walk(model, _by_size(int(policy)))
    if isinstance(policy, (type, str)):
        return _of_classes(model, {policy: {}})
    if isinstance(policy, Mapping):
        return _of_classes(model, policy)
    run = getattr(policy, RUN_POLICY, None)
    if run is not None:
        return dict(run(model, set(), {}))
    if isinstance(policy, Collection):
        return _of_classes(model, {each: {} for each in policy})
    if callable(policy):
        return _of_function(model, policy)
    raise TypeError(
        f"policy: expected classes, a number of elements, a function or a policy of torch, got {type(policy).__name__}"
    )


def _of_classes(model: nn.Module, classes: Mapping[Any, Any]) -> Chosen:
    for cls, options in classes.items():
        if not (isinstance(cls, str) or (isinstance(cls, type) and issubclass(cls, nn.Module))):
            raise TypeError(f"policy: expected classes of modules, or their names, got {cls!r}")
        if not isinstance(options, Mapping):
            raise TypeError(f"policy: expected a dict of arguments for {cls!r}, got {type(options).__name__}")
    found: Chosen = {}
    for module in model.modules():
        for cls, options in classes.items():
            if type(module).__name__ == cls if isinstance(cls, str) else isinstance(module, cls):
                found[module] = options
                break
    return found


def _repeated(model: nn.Module) -> Chosen:
    """Returns the modules that a ModuleList or Sequential has two or more of, not those inside of others."""
    if isinstance(model, (nn.ModuleList, nn.Sequential)):
        kinds = [type(child) for child in model]
        blocks = [each for each in model if kinds.count(type(each)) > 1 and any(True for _ in each.parameters())]
        if blocks:
            return {block: {} for block in blocks}
    return {module: options for child in model.children() for module, options in _repeated(child).items()}


def _of_function(model: nn.Module, function: Callable[..., Any]) -> Chosen:
    parameters = inspect.signature(function).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    if takes_any or {"recurse", "nonwrapped_numel"} <= {*parameters}:
        return _walk(model, lambda module, recurse, numel: function(module, recurse=recurse, nonwrapped_numel=numel))
    required = [
        p
        for p in parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if len(required) not in (1, 2):
        raise TypeError(
            "policy: expected a function of a module, of its name and the module, or of module, recurse, "
            f"nonwrapped_numel; got one of {', '.join(parameters) or 'nothing'}"
        )
    found: Chosen = {}
    for module, name in modules_below(model).items():
        answer = function(module) if len(required) == 1 else function(name, module)
        if not isinstance(answer, (bool, Mapping)):
            raise TypeError(f"policy: expected a bool or a dict for {name or 'the model'}, got {answer!r}")
        if answer is not False:
            found[module] = {} if answer is True else dict(answer)
    return found


def _by_size(min_numel: int) -> Callable[[nn.Module, bool, int], bool]:
    def decide(module: nn.Module, recurse: bool, numel: int) -> bool:
        return numel >= min_numel and not (recurse and isinstance(module, _WHOLE))

    return decide


def _walk(model: nn.Module, decide: Callable[[nn.Module, bool, int], Any]) -> Chosen:
    """Asks `decide(module, recurse, numel)` as torch's recursive wrapping does: whether to go into a module, then, from
    the inside out, whether to shard it. `numel`: elements of its parameters that no chosen module inside has.
    """
    found: Chosen = {}

    def visit(module: nn.Module) -> int:
        numel = sum(param.numel() for param in module.parameters())
        if not decide(module, True, numel):
            return 0
        inside = sum(visit(child) for child in module.children() if child not in found)
        if module is not model and not isinstance(module, _CONTAINERS) and decide(module, False, numel - inside):
            found[module] = {}
            return numel
        return inside

    visit(model)
    return found


def _check_options(name: str, options: Mapping[str, Any]) -> None:
    unknown = [each for each in options if each not in OPTIONS]
    if unknown:
        raise ValueError(f"policy: {name}: expected the arguments {', '.join(OPTIONS)}, got {', '.join(unknown)}")


def _classes_in(model: nn.Module) -> Iterable[str]:
    return sorted({type(m).__name__ for m in model.modules() if m is not model and any(True for _ in m.parameters())})


def _text(policy: Any) -> str:
    if isinstance(policy, Collection) and not isinstance(policy, str):
        return ", ".join(_text(each) for each in policy) or "an empty collection"
    return policy.__name__ if isinstance(policy, type) else str(policy)


# ---- tied parameters, order


def _tie(model: nn.Module, chosen: Chosen, left: frozenset[nn.Module] = frozenset()) -> list[WrapGroup]:
    """Returns the groups of the chosen modules: those that share a parameter are one.

    `left`: modules that are left to the module around them, because they can't be in a group of their own.
    """
    names = modules_below(model)
    joined: list[dict[nn.Module, None]] = [{module: None} for module in chosen]
    for holders in _holders(model).values():
        owners = {_owner(holder, model, names, chosen): holder for holder in holders}
        if len(owners) < 2:
            continue
        # A holder that only the model itself would shard joins the others as a module of its own.
        members = dict.fromkeys(holder if owner is model else owner for owner, holder in owners.items())
        impossible = {model, *left, *(each for each in members if isinstance(each, _CONTAINERS))}
        if not impossible.isdisjoint(members):
            return _tie(model, _without(chosen, members), left | members.keys())
        if any(each not in chosen for each in members):
            return _tie(model, {**{each: {} for each in members}, **chosen}, left)
        sets = [each for each in joined if any(member in each for member in members)]
        merged = {module: None for each in sets for module in each}
        inner = [each for each in merged if any(_is_inside(each, outer) for outer in merged)]
        if inner:
            return _tie(model, _without(chosen, inner), left.union(inner))
        joined = [each for each in joined if each not in sets] + [merged]
    return _in_order([_make_group([*each], names, chosen) for each in joined], names)


def _without(chosen: Chosen, modules: Collection[nn.Module]) -> Chosen:
    return {module: options for module, options in chosen.items() if module not in modules}


def _holders(model: nn.Module) -> dict[Tensor, list[nn.Module]]:
    found: dict[Tensor, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and module not in found.setdefault(parameter, []):
                found[parameter].append(module)
    return found


def _owner(holder: nn.Module, model: nn.Module, names: dict[nn.Module, str], chosen: Chosen) -> nn.Module:
    """Returns the innermost chosen module around `holder`, or the model."""
    around = [each for each in chosen if each is holder or _is_inside(holder, each)]
    return max(around, key=lambda each: len(names[each]), default=model)


def _is_inside(inner: nn.Module, outer: nn.Module) -> bool:
    return inner is not outer and any(each is inner for each in outer.modules())


def _make_group(modules: list[nn.Module], names: dict[nn.Module, str], chosen: Chosen) -> WrapGroup:
    modules.sort(key=[*names].index)
    options = {name: value for module in modules for name, value in chosen.get(module, {}).items()}
    return WrapGroup(names[modules[0]], tuple(modules), options)


def _in_order(groups: list[WrapGroup], names: dict[nn.Module, str]) -> list[WrapGroup]:
    """Returns the groups with inner modules before outer ones, else in the order of the model."""
    position = {module: i for i, module in enumerate(names)}
    groups = sorted(groups, key=lambda group: position[group.modules[0]])
    of_module = {module: group for group in groups for module in group.modules}
    graph = {
        i: {
            groups.index(of_module[each])
            for module in group.modules
            for each in module.modules()
            if each in of_module and of_module[each] is not group
        }
        for i, group in enumerate(groups)
    }
    try:
        return [groups[i] for i in TopologicalSorter(graph).static_order()]
    except CycleError as error:
        tied = [groups[i].name for i in error.args[1]]
        raise ValueError(
            f"policy: {', '.join(tied)} share parameters across each other's modules. Choose a module around them."
        ) from error
