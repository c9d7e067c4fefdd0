"""Lists ways in which fsdp2 might cut gradients on a device, to be timed beside the way it does and torch's FSDP2."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from fsdp2.core import buckets
from fsdp2.ext.large_gradients import PiecePlan


def _patch_buckets(count: int) -> Any:
    return mock.patch.multiple(buckets, MAX_BUCKETS=count, MAX_BUCKETS_OF_COPIES=count)


def _patch_halves() -> Any:
    """Leaves out halves: one large gradient among others is packed and sent at once."""
    split: Callable[..., Any] = PiecePlan._split
    return mock.patch.object(PiecePlan, "_split", lambda plan, count: [] if count == 2 else split(plan, count))


# Name of a variant -> the library, and what is changed of fsdp2 while a model is built and takes its first steps.
VARIANTS: dict[str, tuple[str, tuple[Callable[[], Any], ...]]] = {
    "fsdp2": ("fsdp2", ()),
    "no halves": ("fsdp2", (_patch_halves,)),
    "2 buckets": ("fsdp2", (_patch_halves, lambda: _patch_buckets(2))),
    "1 bucket": ("fsdp2", (_patch_halves, lambda: _patch_buckets(1))),
    "torch": ("torch", ()),
}


def library_of(name: str) -> str:
    """Returns the library of a variant; a library is one itself."""
    return VARIANTS[name][0] if name in VARIANTS else name


@contextmanager
def in_force(name: str) -> Iterator[None]:
    """Context: build a model of this variant in it, and run one step, in which gradients are cut for all later ones."""
    _, patches = VARIANTS.get(name, ("", ()))
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch())
        yield
