"""Holds the state that one `fully_shard` call gives its modules, and finds it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from ..parameters.cast_buffers import CastBuffers
from .policy import Ending, MixedPrecisionPolicy

if TYPE_CHECKING:
    from .group import FSDPParamGroup
    from .root import Root

# The attribute of a sharded module that holds its state.
STATE = "_fsdp2_state"

_Kind = TypeVar("_Kind")


class Notes:
    """Holds what features and checks keep about the modules of one `fully_shard` call: one object of each class that
    they ask for. The engine reads none of them.
    """

    def __init__(self) -> None:
        self._found: dict[type[object], object] = {}

    def of(self, kind: type[_Kind]) -> _Kind:
        """Returns the object of that class, which is made without arguments the first time."""
        found = self._found.get(kind)
        if not isinstance(found, kind):
            found = self._found[kind] = kind()
        return found


class FSDPState:
    """Holds the modules of one `fully_shard` call and their groups: one for each mesh that their parameters are on,
    and for each place (the device, the CPU) where these rest.

    `parts`: states whose groups the methods of these modules reach as well (large submodules). `running`: how many
    forwards of the modules run now. `unregistered`: the groups whose unsharded parameters the state dict that a module
    is making has unregistered; where it fails, they stay here. `ignored`: modules in `ignored_params`, whose buffers
    stay as they are. `cast_buffers`: gives buffers another dtype, if the policy has one for them. `used`: the groups
    that a forward of the modules unshards: their own, and those that own parameters tied to some of theirs. `tied_to`:
    the latter, when the call was made. `notes`: what features and checks keep; all states of a call share it.
    """

    root: Root  # another one when an outer module is sharded

    def __init__(self, modules: list[nn.Module], groups: list[FSDPParamGroup], policy: MixedPrecisionPolicy) -> None:
        self.modules, self.groups, self.policy = modules, groups, policy
        self.notes = Notes()
        self.used: Sequence[FSDPParamGroup] = groups
        self.tied_to: list[FSDPParamGroup] = []
        self.parts: list[FSDPState] = []
        self.running = 0
        self.unregistered: dict[nn.Module, list[FSDPParamGroup]] = {}
        # What floating-point inputs are cast to.
        self.input_dtype = policy.param_dtype if policy.cast_forward_inputs else None
        self.ignored: set[nn.Module] = set()
        for group in groups:
            group.state = self
        self.cast_buffers = None if policy.buffer_dtype is None else CastBuffers(self, policy.buffer_dtype)
        groups[0].registration.use_cast_buffers(self.cast_buffers)

    def __repr__(self) -> str:
        return str(self.groups[0])

    def post_forward(self, ending: Ending, module: nn.Module | None = None, has_run: bool = False) -> None:
        """Reshards the groups, or keeps them for backward, when a forward has ended.

        `module`: whose forward it was, of a list that shares the groups, which may need them for the others. `has_run`:
        the code of modules has run, see FSDPParamGroup.post_forward.
        """
        if self.running > 1 or (len(self.modules) > 1 and module is not None and self._waits(module, ending)):
            return
        for group in self.used:
            if not (group.users and group.runs_beside(self)):
                group.post_forward(ending, has_run)
        if self.root.read_outside:
            for group in [group for part in self.parts for group in part.used if group in self.root.read_outside]:
                group.post_forward(ending)
                self.root.read_outside.discard(group)

    def _waits(self, module: nn.Module, ending: Ending) -> bool:
        """Returns True if other modules of the list are still to run in this pass."""
        forward = self.root.forward
        finished = forward.finished.setdefault(self, set())
        finished.add(module)
        if len(self.root.running) > 1 and not finished.issuperset(self.modules):
            forward.unfinished[self] = ending
            return True
        finished.clear()
        forward.unfinished.pop(self, None)
        return False

    def own_modules(self) -> dict[nn.Module, None]:
        """Returns the modules, and those below that are in no other sharded module."""
        found, waiting = dict.fromkeys(self.modules), list(self.modules)
        while waiting:
            children = waiting.pop()._modules.values()
            own = [each for each in children if each is not None and each not in found and state_of(each) is None]
            found.update(dict.fromkeys(own))
            waiting += own
        return found


def state_of(module: nn.Module) -> FSDPState | None:
    """Returns the state that a `fully_shard` call left on `module`, or None."""
    return module.__dict__.get(STATE)


def require_state(module: Any) -> FSDPState:
    """Returns the state of a sharded module.

    Raises:
        TypeError: it is no module.
        RuntimeError: it is not sharded.
    """
    state: FSDPState | None = getattr(module, "__dict__", {}).get(STATE)
    if state is None:
        require_module("model", module)
        raise RuntimeError(f"{type(module).__name__}: expected a module that fully_shard was applied to")
    return state


def require_module(name: str, value: object, function: str = "") -> None:
    """Raises TypeError if `value`, the argument `name` of a public `function`, is no module."""
    if not isinstance(value, nn.Module):
        where = f"{function}: {name}" if function else name
        raise TypeError(f"{where}: expected an nn.Module, got {type(value).__name__}")


def root_of(module: Any) -> Root:
    """Returns the Root that runs a sharded module: that of the outermost sharded module around it, which a later
    `fully_shard` call on an outer one replaces. It raises what `require_state` does.
    """
    return require_state(module).root


def states_of(module: Any) -> list[FSDPState]:
    """Returns the state of a sharded module, and its parts. It raises what `require_state` does."""
    state = require_state(module)
    return [state, *state.parts]


def groups_of(module: Any) -> list[FSDPParamGroup]:
    """Returns all groups that a sharded module uses. It raises what `require_state` does."""
    return list(dict.fromkeys(group for state in states_of(module) for group in state.used))


def groups_below(module: nn.Module) -> list[FSDPParamGroup]:
    """Returns the groups that sharded modules in `module`, itself included, use, outermost first."""
    return list(dict.fromkeys(group for state in states_among(modules_below(module)) for group in state.used))


def states_among(modules: Iterable[nn.Module]) -> Iterator[FSDPState]:
    """Yields the states of those of `modules` that are sharded, each once."""
    found = (state for module in modules if STATE in module.__dict__ for state in states_of(module))
    yield from dict.fromkeys(found)


def modules_below(root: nn.Module, name: str = "", and_sharded: bool = True) -> dict[nn.Module, str]:
    """Returns `root`, whose FQN is `name`, and all modules in it, outermost first, with their FQNs: `named_modules`, in
    a third of the time. `and_sharded`: also sharded modules, and what is in them.
    """
    names: dict[nn.Module, str] = {}
    waiting = [(root, name)]
    while waiting:
        module, name = waiting.pop()
        if module not in names and (and_sharded or state_of(module) is None):
            names[module] = name
            if children := module._modules:
                prefix = f"{name}." if name else ""
                waiting += [(child, prefix + own) for own, child in reversed(children.items()) if child is not None]
    return names


def names_below(roots: Iterable[nn.Module]) -> dict[nn.Module, str]:
    """Returns the modules in each of `roots`, whose own FQNs are empty, with their FQNs."""
    names: dict[nn.Module, str] = {}
    for root in roots:
        names |= modules_below(root)
    return names
