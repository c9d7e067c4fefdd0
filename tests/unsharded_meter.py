"""Counts what groups gather, and how much of them is unsharded besides what is in use."""

from fsdp2.engine.events import Observer
from fsdp2.engine.group import FSDPParamGroup


class Meter(Observer):
    """Counts all-gathers of groups inside the root, those that forward begins ahead of use, and the most bytes
    unsharded besides the groups in use.
    """

    def __init__(self) -> None:
        self.gathers: list[FSDPParamGroup] = []
        self.num_ahead = 0
        self.peak = 0
        self._last: FSDPParamGroup | None = None

    @property
    def nbytes(self) -> int:
        """The unsharded bytes of all that was gathered."""
        return sum(group.nbytes for group in self.gathers)

    def before_gather(self, group: FSDPParamGroup) -> None:
        if group is not group.root.group:
            self.gathers.append(group)
            self.num_ahead += group.num_running == 0

    def unsharded(self, group: FSDPParamGroup) -> None:
        # In backward, the group that was reached before has perhaps not left. The root is in use in all of a pass.
        root, in_use = group.root, {group, group.root.group, self._last}
        there = [each for each in root.groups if each.unsharded.is_allocated and each not in in_use]
        if group is not root.group:
            self.peak, self._last = max(self.peak, sum(each.nbytes for each in there)), group

    def clear(self) -> None:
        self.gathers.clear()
        self.peak = self.num_ahead = 0
