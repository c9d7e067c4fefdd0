"""One group at run time: what a user has set for it, and how far a pass has come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import nn

from . import torch_compat
from .bridge.torch_interface import TorchState
from .guards.full_content import FullContent, refuse_differing
from .guards.looks import is_time_to_look
from .mesh import DataMesh
from .param import fqn
from .param_group import SHARDED, FSDPParamGroup
from .policy import MixedPrecisionPolicy
from .versions import refuse_written

# Where a sharded module has its (outer) state.
STATE = "_fsdp2_state"

_EVERY_AT_FIRST = 64


class FSDPState(TorchState):
    """One group at run time: its modules, its settings, and how far a pass has come.

    A `fully_shard` call makes one state; several, each `inner` to the one before, where parameters have meshes of their
    own, or large modules are units.
    """

    context: Any  # a Context, which sets it: anew when an outer module is sharded

    def __init__(
        self,
        modules: list[nn.Module],
        group: FSDPParamGroup,
        policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | None,
        few: int | None = None,
        conditional: bool = False,
    ) -> None:
        self.modules, self.group, self.policy = modules, group, policy
        # Of the same call: its parameters on another mesh. Their forward is run inside this one's.
        self.inner: FSDPState | None = None
        # Of the same call: the states of large modules below, which run by themselves (see units.py), and the state
        # whose unit this one is. Units come last in the chain of inner states.
        self.units: list[FSDPState] = []
        self.outer: FSDPState | None = None
        # Whether some ranks may leave `modules` out; and the innermost such state that this one is, or lies in, if any.
        self.conditional = conditional
        self.gate: FSDPState | None = None
        # Whether, in the pass that runs, the outer module has read parameters without calling the unit.
        self.read_outside = False
        # What a user may set: see the methods of FSDPModule.
        self.reshard_after_forward = reshard_after_forward
        # Instead of all, free all but a part, from which so few ranks restore the rest.
        self.keeps_part = few is not None
        group.keep_part_among(few)
        self.reshard_after_backward = True
        self.unshard_in_backward = True
        self.forward_prefetch: list[FSDPState] | None = None
        self.backward_prefetch: list[FSDPState] | None = None
        self.max_reductions = 1
        # Forwards of `modules` that run now, and those of a list that have run in this pass.
        self.running = 0
        self.finished: set[nn.Module] = set()
        # States whose full parameters a state dict that is being made has taken out of their modules.
        self.hidden: list[FSDPState] = []
        # Whether a forward left the full parameters behind for backward; another pass does not use them.
        self.kept = False
        # Whether another pass may use them: the user has gathered them, or wanted them to stay.
        self.held = False
        # True from unshard() on, until reshard() or a pass with grad frees the group: forwards without grad do not.
        self.is_pinned = False
        # Whether, as far as the pass before tells, backward begins with this group, or gathers it as soon as it begins.
        self.is_needed_at_once = False
        # Gathered and registered for the backward that runs.
        self.backward_ready = False
        # Whether, in the last backward, counting its gradients was enough to know when to free the group.
        self.completes = False
        # The full backward hooks of each of the group's modules; empty until a backward asks.
        self.backward_hooks: list[dict[int, Any]] = []
        # What floating-point inputs are cast to.
        self.input_dtype = policy.param_dtype if policy.cast_forward_inputs else None
        # How many forwards of `modules` have begun; what the full parameters held then, if the one that runs looks.
        self.forwards = 0
        self.content: FullContent | None = None
        # How many `full_params` blocks have used them outside of forwards.
        self.blocks = 0
        # Of the sharded parameters, when they were last gathered on purpose.
        self.versions: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return self.group.name

    def __getstate__(self) -> dict[str, Any]:
        """What a copy starts from. Prefetch lists name states of the whole model: they come with its root."""
        if self.running or self.group.is_lent or self.context.is_in_backward():
            raise RuntimeError(
                f"{self}: a sharded module can't be copied or pickled while a forward or backward runs, nor inside "
                "full_params"
            )
        runtime = ("context", "finished", "versions", "content", "forward_prefetch", "backward_prefetch", "gate")
        kept = {name: value for name, value in vars(self).items() if name not in runtime}
        settings = self.context.settings() if self.context.root is self else None
        kept["backward_hooks"] = []
        flags = dict.fromkeys(("kept", "held", "is_pinned", "backward_ready", "completes"), False)
        return {**kept, **flags, "settings": settings}

    def wake(self) -> dict[str, Any] | None:
        """Become usable, in a copy of which all modules are there. Return the settings that the context is to take."""
        self.group.wake()
        self.finished, self.versions, self.forward_prefetch, self.backward_prefetch = set(), (), None, None
        self.gate = self.content = None
        settings: dict[str, Any] | None = vars(self).pop("settings")
        return settings

    def _keeps_after_forward(self) -> bool:
        """Whether the full parameters stay for backward: by default the root's, and those that it needs at once."""
        if self.reshard_after_forward is None:
            return self.context.root is self or self.is_needed_at_once or self.read_outside
        return self.reshard_after_forward is False

    def settle(self, backward_follows: bool, failed: bool = False) -> None:
        """Forward is over: register the sharded parameters; free the full ones' data, or keep all or some of it.

        Without a backward, they stay until a weight changes if the user wants that: each token that a model generates
        would take a gather of each group otherwise. `failed`: the forward has raised, perhaps after writing to them.
        """
        self.finished.clear()
        if not backward_follows and not failed and (self.is_pinned or self.reshard_after_forward is False):
            self.kept, self.held = False, True
            if not self.is_pinned:
                self.group.faces.uninstall()
            return
        self.kept = backward_follows
        if backward_follows and self._keeps_after_forward():
            self.held |= not self.reshard_after_backward
            self.group.faces.uninstall()
        elif backward_follows and self.keeps_part and self.group.is_unsharded and not self.context.graph_reads_weights:
            self.held = self.is_pinned = False
            self.group.shrink()
        else:
            self.kept = self.is_pinned = False
            self._reshard()

    def note_versions(self, now: tuple[int, ...] | None) -> None:
        """The full parameters are about to be saved for backward, or read by it. `now`: the versions of what they were
        made of.
        """
        if self.context.notices_saved_tensors and now != self.versions:  # else the same object: no time to compare
            assert now is not None, "noted at each gather for a forward"
            self.versions = now

    def find_backward_hooks(self) -> list[dict[int, Any]]:
        """Returns the dicts in which torch keeps them, of modules that no other group has, and of all modules."""
        own = [module._backward_hooks for module in _own_modules(self.modules)]
        self.backward_hooks = [*own, torch_compat.hooks_of_all_modules]
        return self.backward_hooks

    def note_content(self) -> None:
        """A forward begins, with full parameters: in the 1st, 2nd, 4th, ... note what they hold; at the debug level in
        each. In the 1st, look whether buffers have memory, too.
        """
        if self.running > 1:
            return
        if not self.forwards:
            self._refuse_buffers_on_meta()
        self.forwards += 1
        checks_all = self.group.is_checked
        if is_time_to_look(self.forwards, checks_all):
            # What writes in the first, to initialise, writes to all; and programs shall start quickly.
            every = _EVERY_AT_FIRST if self.forwards == 1 and not checks_all else 1
            self.content = self.group.adopted.note_content(every)
            if self.held:
                self.context.reads.add(self.content.differences(), partial(self._judge, self.content, refuse_differing))

    def _refuse_buffers_on_meta(self) -> None:
        """Raise RuntimeError if one is there: torch may read as indices what a meta tensor has not."""
        device = self.group.mesh.device
        found = buffers_on_meta(_own_modules(self.modules))
        if found and device.type != "meta":
            below = names_below(self.context.root.modules)
            names = [f"{fqn(below[module], name)} on meta" for module, name in found]
            raise RuntimeError(
                f"expected buffers on {device}, got {', '.join(names)}. Materialise the model before its first "
                f"forward: model.to_empty(device={device.type!r}), then initialise or load; or assign what the state "
                "dict that was loaded lacks."
            )

    def check_content(self) -> None:
        """The forward ends, which looks: have the pass raise at its end if they hold something else now, and raise
        RuntimeError at once if they lie elsewhere. Then they have their own memory again.
        """
        content, self.content = self.content, None
        assert content is not None, "noted when it began"
        refuse_written(self.group.adopted.take_moved())
        self.context.reads.add(content.changes(), partial(self._judge, content, refuse_written))

    def _judge(self, content: FullContent, refuse: Callable[[Sequence[str]], None], flags: Sequence[int]) -> None:
        """Raise what `refuse` does to the parameters that `flags` are set for, and let go of what was gathered."""
        names = content.named(flags)
        if names:
            self.is_pinned = False
            self.release()
            refuse(names)

    def drop_content(self) -> None:
        """The forward has failed: have the full parameters their memory again, whatever it has assigned."""
        self.content = None
        if self.group.is_unsharded:
            self.group.adopted.take_moved()

    def serve(self) -> None:
        """Take part in a gather that other ranks need. Every rank must call it, or gather by itself."""
        if self.group.state is not SHARDED:
            self.group.unshard_again()
        else:
            self.group.unshard()
            self._reshard()

    def hold(self) -> None:
        """The user is about to gather the group: passes that do not free it shall not gather it again."""
        self.held = True
        self.group.notes_changes = True

    def release(self) -> None:
        """Reshard, unless a forward of the group runs (a backward may run inside it)."""
        self.backward_ready = self.kept = False
        if not self.running:
            self._reshard()

    def release_after_backward(self) -> None:
        """Like `release`, but keep the full parameters' data for the next pass if the user wants that."""
        if self.reshard_after_backward or self.running or not self.group.is_unsharded:
            self.is_pinned = False
            self.release()
        else:
            self.backward_ready = False
            self.kept = self.held = True
            self.group.faces.uninstall()

    def is_kept_for_next_pass(self) -> bool:
        """Whether a full copy of the pass before may be used: the user wants it, and no parameter has changed."""
        return self.held and self.group.is_up_to_date()

    def _reshard(self) -> None:
        self.held = False
        self.group.notes_changes = not self.reshard_after_backward
        self.group.reshard(free=not self.context.graph_reads_weights)


def state_of(module: nn.Module) -> FSDPState | None:
    """The (outer) state that a `fully_shard` call left on `module`."""
    return module.__dict__.get(STATE)


def require_state(module: Any) -> FSDPState:
    """The same, for a module that must have been sharded.

    Raises:
        RuntimeError: it wasn't.
    """
    state = state_of(module)
    if state is None:
        raise RuntimeError(f"{type(module).__name__}: expected a module that fully_shard was applied to")
    return state


def states_of(module: Any) -> Iterator[FSDPState]:
    """All states of a module that must have been sharded, from the outer to the inner.

    Raises:
        RuntimeError: it wasn't.
    """
    state: FSDPState | None = require_state(module)
    while state is not None:
        yield state
        state = state.inner


def modules_below(root: nn.Module, name: str = "", and_sharded: bool = True) -> dict[nn.Module, str]:
    """`root`, which is called `name`, and all modules in it, outermost first, with their FQNs: `named_modules`, in a
    third of the time. `and_sharded`: also those that a `fully_shard` call was applied to, and what is in them.
    """
    names: dict[nn.Module, str] = {}
    waiting = [(root, name)]
    while waiting:
        module, name = waiting.pop()
        if module not in names and (and_sharded or state_of(module) is None):
            names[module] = name
            prefix = f"{name}." if name else ""
            for own, child in reversed(module._modules.items()):
                if child is not None:
                    waiting.append((child, prefix + own))
    return names


def names_below(roots: Iterable[nn.Module]) -> dict[nn.Module, str]:
    """`modules_below` each of `roots`, whose own names are empty."""
    return {module: name for root in roots for module, name in modules_below(root).items()}


def _own_modules(modules: Sequence[nn.Module]) -> dict[nn.Module, None]:
    """`modules`, and those below that are in no other sharded module."""
    found, waiting = dict.fromkeys(modules), list(modules)
    while waiting:
        children = waiting.pop()._modules.values()
        own = [each for each in children if each is not None and each not in found and state_of(each) is None]
        found.update(dict.fromkeys(own))
        waiting += own
    return found


def buffers_on_meta(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, str]]:
    """Where those of `modules` are registered that have elements, and no memory for them."""
    return [
        (module, name)
        for module in modules
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.is_meta and buffer.numel()
    ]


def states_below(module: nn.Module) -> Iterator[FSDPState]:
    """The states of every sharded module in `module`, itself included, outermost first."""
    return states_among(modules_below(module))


def states_among(modules: Iterable[nn.Module]) -> Iterator[FSDPState]:
    """The states of those of `modules` that are sharded."""
    for module in modules:
        if state_of(module) is not None:
            yield from states_of(module)


def hide_full(states: Iterable[FSDPState]) -> list[FSDPState]:
    """Register the sharded parameters where the full ones are: of the states that are returned, for `show_full`."""
    hidden = [state for state in states if state.group.faces.installed]
    for state in hidden:
        state.group.faces.uninstall()
    return hidden


def show_full(hidden: list[FSDPState]) -> None:
    """Register the full parameters again, and empty the list."""
    while hidden:
        hidden.pop().group.faces.install()


def data_mesh_of(states: Iterable[FSDPState]) -> DataMesh:
    """The mesh of most ranks: those that train on one batch."""
    return max((state.group.mesh for state in states), key=lambda mesh: mesh.num_ranks)


def some_of(names: Sequence[str]) -> str:
    """For errors: the first of them, and how many more."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
