"""Puts the fixes of table.py in force, and switches them.

`install` connects this folder to the engine. Nothing of torch is changed before the first module is sharded.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.tensor import DTensor

from ..engine.events import Observer, extend
from ..engine.group import FSDPParamGroup
from ..engine.once import once
from ..engine.parameter import FSDPParam
from ..engine.root import Root
from ..engine.torch_names import keep_out_of_graphs
from ..engine.write_notices import notices
from . import switches
from .compat import DISPATCHES_TO_SUBCLASSES, allow_in_foreach, meshes_in_use
from .optimizer_steps import note_call
from .sharded_dtensor import ShardedDTensor, forget_replacements, look_up_in_user_classes
from .table import FIXES, NAMES, Fix


class Meshes(Observer):
    """Notes the meshes of sharded parameters, which torch before 2.13 knows our operations by."""

    def attached(self, root: Root) -> None:
        for group in root.new_groups:
            self.rebuilt(group, {})

    def rebuilt(self, group: FSDPParamGroup, replaced: Mapping[FSDPParam, nn.Parameter]) -> None:
        for mesh in {id(mesh): mesh for mesh in [param.dtensor_spec.mesh for param in group.params]}.values():
            meshes_in_use.add(mesh)


def join_fixes(root: Root) -> None:
    """Puts the fixes in force once the first module is sharded, and those for users' classes once one has such."""
    correct_torch()
    if any(param.leaf_class is not nn.Parameter for group in root.new_groups for param in group.params):
        look_up_in_user_classes()


def install() -> None:
    """Makes the engine use ShardedDTensor for sharded parameters, and adds what joins each new root. It is called
    once, before any module is sharded.
    """
    extend(
        tensor_class=ShardedDTensor,
        features=(join_fixes, note_call),
        observers=(lambda root: Meshes(),),
    )


def _use_class(cls: type[DTensor]) -> None:
    """Makes `cls` the class of sharded parameters from now on. Writes to them are announced before they happen if
    torch calls the class for operations, and no local tensor has been returned to a user.
    """
    extend(tensor_class=cls)
    allow_in_foreach(cls)
    notices.sees_operations = cls is not DTensor and DISPATCHES_TO_SUBCLASSES
    notices.are_seen = notices.sees_operations and not notices.are_awaited


@once
def correct_torch() -> None:
    """Puts the fixes in force, without those that the environment leaves out."""
    keep_out_of_graphs()
    switches.read_environment(NAMES)
    _attach()
    for fix in FIXES:
        if fix.patch is not None:
            fix.patch()


def _attach() -> None:
    forget_replacements()
    for fix in FIXES:
        if fix.attach is not None and switches.is_on(fix.name):
            fix.attach()
    _use_class(ShardedDTensor if any(switches.is_on(fix.name) for fix in FIXES if fix.attach) else DTensor)


def dtensor_fixes(enabled: bool, *names: str) -> None:
    """Switches fixes for sharded parameters on or off, from now on, in this process. Call it on every rank alike.

    All fixes are on unless the environment variable FSDP2_DTENSOR_FIXES says otherwise: `off`, or names to leave out
    (`-views,-random`). `python -m fsdp2 fixes` prints what each does.

    Args:
        enabled: True: operations do what they do on plain tensors. False: they do what they do on torch's DTensor.
        names: the names of fixes; without names all fixes are switched. With all off, modules that are sharded from
            then on have plain DTensors.

    Raises:
        TypeError: `enabled` is not a bool.
        ValueError: there is no fix of that name.
    """
    if not isinstance(enabled, bool):
        raise TypeError(f"enabled: expected a bool, got {enabled!r}")
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise ValueError(f"names: expected some of {', '.join(NAMES)}; got {', '.join(map(str, unknown))}")
    correct_torch()
    switches.switch(names or NAMES, enabled)
    _attach()


def describe_fixes() -> str:
    """Returns the table as Markdown: a line for each fix, with what torch does, what fsdp2 does instead, whether it is
    in force in this environment, and in how many of the tests' situations training goes wrong without it.
    """
    lines = ["| fix | in force | torch | instead | situations |", "|---|---|---|---|---|"]
    for fix in FIXES:
        cells = (fix.name, state_of_fix(fix), fix.torch, fix.instead, str(fix.situations))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def state_of_fix(fix: Fix) -> str:
    """Returns "yes" or "off": if the fix is in force in this environment.

    Raises:
        ValueError: the environment names a fix that there is not.
    """
    switches.read_environment(NAMES)
    return "yes" if switches.is_on(fix.name) else "off"
