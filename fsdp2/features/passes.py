"""Does what users ask of a root between passes: reduce, finish, drop everything, wait."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..engine.group import FSDPParamGroup
from ..engine.placeholders import drop_placeholders

if TYPE_CHECKING:
    from ..engine.root import Root


def reduce_unsynchronized(root: Root, groups: Iterable[FSDPParamGroup] | None = None) -> None:
    """Begins to reduce unsynchronized gradients between backward passes, of all groups or of some, and frees what a
    backward pass would have freed at its end. `finalize` delivers. Every rank must call it.

    Raises:
        RuntimeError: during a backward pass.
    """
    if root.is_in_backward():
        raise RuntimeError("unsynchronized gradients are reduced by the backward pass that runs: ask afterwards")
    with _all_or_nothing(root):
        root.queue.finish_partial()
        chosen = list(reversed(root.groups) if groups is None else groups)
        if root.consensus is not None:
            root.consensus.before_backward()
        if any(group.gradients.unsynchronized.were_left for group in chosen):
            root.follow_changes()
            root.notify(root.events.backward_began)
            root.take_placeholders()
        for group in chosen:
            if group.gradients.unsynchronized.were_left:
                # As one more backward that computes nothing. Gradients that a user has assigned are included.
                group.gradients.begin_backward(object())
                group.gradients.flush()
                group.gradients.end_backward()
            group.finish_backward()
        root.resume_reductions(chosen)
        if root.settings.is_last_backward:
            root.prefetcher.ran.clear()


def finalize(root: Root) -> None:
    """Finishes the reductions in flight between backward passes, and writes `.grad`."""
    with _all_or_nothing(root):
        root.deliver()


@contextmanager
def _all_or_nothing(root: Root) -> Iterator[None]:
    """Context: after an error, reductions in flight are dropped, so that no incomplete sum is delivered later."""
    try:
        yield
    except BaseException:
        root.queue.abandon(None)
        root.recover()
        raise


def reset(root: Root) -> None:
    """Drops all that is in flight or unsharded, and unsynchronized gradients."""
    root.note_reset()
    root.queue.abandon(None)
    root.recover()
    for group in root.groups:
        group.gradients.unsynchronized.clear()
    drop_placeholders(root)
    root.forget_running()
    for group in root.groups:
        group.reshard_if_idle()


class _OptimizerEvent:
    """Has the next gather wait for an event of the optimizer's stream, once."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def __call__(self, group: FSDPParamGroup) -> None:
        event, self.event = self.event, None
        if event is not None:
            event.wait()


def wait_for(root: Root, event: Any) -> None:
    """Has the next gather under `root` wait for `event`. None: it waits for none."""
    root.waits_before_read[:] = [each for each in root.waits_before_read if not isinstance(each, _OptimizerEvent)]
    if event is not None:
        root.waits_before_read.append(_OptimizerEvent(event))
