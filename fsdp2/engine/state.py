"""Holds the state that one `fully_shard` call gives its modules, and finds it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from threading import get_ident
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from ..calls.user_code import hides_modes
from ..parameters.cast_buffers import CastBuffers
from ..parameters.ties import connect_ties
from .policy import Ending, MixedPrecisionPolicy
from .root import Root

if TYPE_CHECKING:
    from .group import FSDPParamGroup

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
    """The modules of one `fully_shard` call, with their groups of parameters: one group for each mesh and for each
    place (the device, the CPU) where parameters are stored.

    It knows which sharded module is the outermost one around it. That module's Root runs the passes of all.
    """

    def __init__(
        self,
        modules: list[nn.Module],
        groups: list[FSDPParamGroup],
        policy: MixedPrecisionPolicy,
        parts: Sequence[FSDPState] = (),
        ignored: Iterable[nn.Module] = (),
        notes: Notes | None = None,
    ) -> None:
        self.modules, self.groups, self.policy = modules, groups, policy
        # States of large submodules of these modules: the methods of the modules act on their groups, too.
        self.parts = [*parts]
        # Modules in `ignored_params`: their buffers stay as they are.
        self.ignored = {*ignored}
        # Notes of features and checks about the call. All states of one call share them.
        self.notes = Notes() if notes is None else notes
        # The groups that a forward of the modules unshards: their own, and those that own parameters tied to theirs.
        self.used: Sequence[FSDPParamGroup] = groups
        # Groups of earlier calls that own parameters of these modules.
        self.tied_to: list[FSDPParamGroup] = []
        # States of the parts and of all sharded modules inside, outermost first, as the call has found them.
        self.inside: list[FSDPState] = []
        # The state of the outermost sharded module around; itself, while there is no sharded module around it.
        self.outermost: FSDPState = self
        # How many forwards of the modules run now.
        self.running = 0
        # Module that is making a state dict -> groups that have unregistered their unsharded parameters for it. If that
        # fails, they stay here.
        self.unregistered: dict[nn.Module, list[FSDPParamGroup]] = {}
        # The dtype to which floating-point inputs are cast.
        self.input_dtype = policy.param_dtype if policy.cast_forward_inputs else None
        self._made_on = get_ident()
        for group in groups:
            group.join_state(self)
        # Gives buffers another dtype, if the policy has one for them.
        self.cast_buffers = None if policy.buffer_dtype is None else CastBuffers(self, policy.buffer_dtype)
        groups[0].registration.use_cast_buffers(self.cast_buffers)

    # ---- the root

    @cached_property
    def root(self) -> Root:
        """Runs the passes of these modules: the Root of the outermost sharded module.

        It is built when it is first asked for. To build it does not communicate: one rank alone may ask.
        """
        return self._build_root() if self.outermost is self else self.outermost.root

    @hides_modes
    def _build_root(self) -> Root:
        root = Root(self, [self, *self.inside])
        try:
            root.take_over()
        except BaseException:  # an observer of a user's, for example
            self.drop_root()
            raise
        return root

    def drop_root(self) -> None:
        """Has the next use of these modules build another Root, for the same modules."""
        for state in (self, *self.inside):
            if state.outermost is self:
                state._leave_root()

    def run_under(self, root: Root) -> None:
        """Runs under `root` from now on."""
        self.root = root
        for group in self.groups:
            group.join_root(root)

    def _leave_root(self) -> None:
        vars(self).pop("root", None)
        for group in self.groups:
            group.leave_root()

    @property
    def built_root(self) -> Root | None:
        """The Root that runs these modules, if it is built."""
        return vars(self).get("root")

    @property
    def thread(self) -> int:
        """Identity of the thread on which the last forward pass has begun, or else fully_shard was called."""
        root = self.built_root
        return self._made_on if root is None else root.forward.thread

    def enclose(self, inside: Iterable[FSDPState]) -> None:
        """Makes this the outermost state around the states `inside`: its Root runs their passes from now on."""
        self.inside = [state for state in dict.fromkeys([*self.parts, *inside]) if state is not self]
        for state in self.inside:
            state._leave_root()
            state.outermost = self
        connect_ties([self, *self.inside])

    def use_tied_groups(self, groups: Sequence[FSDPParamGroup]) -> None:
        """Has forwards unshard these groups with the modules' own: they own parameters tied to some of theirs."""
        self.used = [*self.groups, *groups] if groups else self.groups

    # ---- forwards

    def __repr__(self) -> str:
        return str(self.groups[0])

    def post_forward(self, ending: Ending, module: nn.Module | None = None, has_run: bool = False) -> None:
        """Reshards the groups, or keeps them for backward, when a forward of `module` has ended.

        Where the modules are a list that shares the groups, the others may need them next: then it leaves them.
        `has_run`: the code of modules has run, see FSDPParamGroup.post_forward.
        """
        if self.running > 1 or (len(self.modules) > 1 and module is not None and self._waits(module, ending)):
            return
        for group in self.used:
            if not (group.sharing_states and group.runs_beside(self)):
                group.post_forward(ending, has_run)
        read_outside = self.root.forward.read_outside
        if read_outside:
            for group in [group for part in self.parts for group in part.used if group in read_outside]:
                group.post_forward(ending)
                read_outside.discard(group)

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
            # Each module comes here several times, so this calls no function.
            own = [c for c in children if c is not None and c not in found and STATE not in c.__dict__]
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


def require_root(module: Any, function: str) -> Root:
    """Returns the Root of a module that must be the outermost sharded one, for a public `function`.

    Raises:
        TypeError: it is no module.
        RuntimeError: it is not sharded, or is inside another sharded module.
    """
    state = require_state(module)
    if state.outermost is not state:
        raise RuntimeError(f"{function}: expected the root, the outermost sharded module, got {state}")
    return state.root


def require_module(name: str, value: object, function: str = "") -> None:
    """Raises TypeError if `value`, the argument `name` of a public `function`, is no module."""
    if not isinstance(value, nn.Module):
        where = f"{function}: {name}" if function else name
        raise TypeError(f"{where}: expected an nn.Module, got {type(value).__name__}")


def root_of(module: Any) -> Root:
    """Returns the Root that runs a sharded module: that of the outermost sharded module around it. After `fully_shard`
    of an outer one it is another. It raises what `require_state` does.
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
    a third of the time. `and_sharded`: also sharded modules, and the modules in them.
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
    """Returns the modules in each of `roots`, with their FQNs below it. The FQN of each root is empty."""
    names: dict[nn.Module, str] = {}
    for root in roots:
        names |= modules_below(root)
    return names
