"""Runs a step group by group, during later computation, and has all readers of shards wait for it."""

from ..features.late_steps import (
    are_ours_alone,
    group_of,
    in_forwards_order,
    late_steps_of,
    may_be_late,
    stepping_late,
)

__all__ = ["are_ours_alone", "group_of", "in_forwards_order", "late_steps_of", "may_be_late", "stepping_late"]
