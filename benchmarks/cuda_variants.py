"""Lists ways in which fsdp2 might cut gradients on a device, to be timed beside the way it does and torch's FSDP2."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from fsdp2.engine import buckets


def _more_buckets() -> Any:
    """Reduces a group in up to sixteen times as many buckets."""
    return mock.patch.object(buckets, "MAX_BUCKET_BYTES", buckets.MAX_BUCKET_BYTES // 16)


def _one_piece() -> Any:
    """Reduces an embedding or a head at once."""
    return mock.patch.object(buckets, "MAX_PIECES_LAUNCHED", 1)


# Name of a variant -> the library, and what is changed of fsdp2 while a model is built and takes its first steps.
VARIANTS: dict[str, tuple[str, tuple[Callable[[], Any], ...]]] = {
    "fsdp2": ("fsdp2", ()),
    "more buckets": ("fsdp2", (_more_buckets,)),
    "1 piece": ("fsdp2", (_one_piece,)),
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
