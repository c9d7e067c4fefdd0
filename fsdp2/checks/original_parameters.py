"""Finds uses of what was a parameter before fully_shard, and is none of the model any more.

It is known by a mark. If it turns up in another fully_shard call it was tied across groups; in an optimizer, that was
built too early; if it gets a gradient, something computes with it.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from ..engine.owners import SHARDED_AS
from ..engine.root import Root
from ..engine.ties import original_of
from ..engine.torch_names import replace_hooks
from .due import Check


class OriginalParameters(Check):
    """Marks original parameters once they have been cut, and refuses to compute gradients for them."""

    def attached(self, root: Root) -> None:
        for group in root.new_groups:
            for original in [reference() for reference in group.originals]:
                mark = None if original is None else original_of(original)
                if original is not None and mark is not None:
                    _mark(original, mark.name)


def _mark(original: nn.Parameter, name: str) -> None:
    setattr(original, SHARDED_AS, name)
    if original.requires_grad:
        replace_hooks(original, partial(_refuse_gradient, name))


def _refuse_gradient(name: str, _: Tensor) -> None:
    raise RuntimeError(
        f"something has computed with what {name} was before fully_shard (a list or view of parameters, another module "
        "that shares it, a loss from before?), which is no parameter of the model any more. Use what modules have now."
    )
