"""What was a parameter before fully_shard, and is none of the model any more: whoever still uses it is told.

It is known by a mark. If it turns up in another fully_shard call it was tied across groups; in an optimizer, that was
built too early; if it gets a gradient, something computes with it.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..core.api import Plan
from ..ext.compat import replace_hooks
from ..ext.owners import SHARDED_AS
from .looks import Check

# By the module and the name of its first slot, from the plan of a call until its group is attached.
_planned: weakref.WeakKeyDictionary[nn.Module, dict[str, tuple[weakref.ref[nn.Parameter], str]]] = (
    weakref.WeakKeyDictionary()
)


def remember_originals(plan: Plan) -> None:
    """Remembers the parameters of a call. They are freed when they are cut, if nobody else holds them."""
    root = type(plan.roots[0]).__name__
    for each in plan.parameters.values():
        slot = each.slots[0]
        _planned.setdefault(slot.module, {})[slot.name] = weakref.ref(slot.get()), f"{root}'s {each.name}"


class OriginalParameters(Check):
    """Marks original parameters once they have been cut, and refuses to compute gradients for them."""

    def attached(self, root: Any) -> None:
        for param in (param for group in root.new_groups for param in group.params):
            planned = _planned.get(param.slots[0].module, {}).pop(param.slots[0].name, None)
            original = planned[0]() if planned is not None else None
            if planned is not None and original is not None and original is not param.sharded:
                setattr(original, SHARDED_AS, planned[1])
                if original.requires_grad:
                    replace_hooks(original, partial(_refuse_gradient, planned[1]))


def _refuse_gradient(name: str, _: Tensor) -> None:
    raise RuntimeError(
        f"something has computed with what {name} was before fully_shard (a list or view of parameters, another module "
        "that shares it, a loss from before?), which is no parameter of the model any more. Use what modules have now."
    )
