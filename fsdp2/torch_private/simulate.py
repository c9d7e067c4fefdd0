"""Collects the private names of torch that `fsdp2.simulate` uses, each with its reason."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .lookup import Missing, load, optional

_RANKS = "simulated ranks"
if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import _World
else:
    # The class of the object in which torch keeps the default process group and all others of a process.
    _World = optional("torch.distributed.distributed_c10d._World", _RANKS)
# (flag): each thread has its own table of the names by which functional collectives find their groups.
_isolate_threads: Callable[[bool], None] = optional("torch._C._distributed_c10d._set_thread_isolation_mode", _RANKS)
# What torch's class keeps in variables of its module.
_TABLES = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag")
_THREAD = "_thread_id"


class RankWorld(_World):
    """The process groups of one simulated rank.

    torch has no public function that gives a thread a default group of its own. It calls the object that this one
    replaces an extension point.
    """

    # They hide the properties of torch's class, so that each object can have its own.
    group_count = 0
    pg_map: Any = None
    pg_names: Any = None
    pg_group_ranks: Any = None
    pg_backend_config: Any = None
    tags_to_pg: Any = None
    pg_to_tag: Any = None

    def __init__(self) -> None:
        super().__init__()
        for name in _TABLES:
            setattr(self, name, {})


def end_thread() -> None:
    """Ends the thread of a rank. With torch 2.11 it waits for the end of the process instead: after the end of a thread
    that has used DTensors, operations of other threads crash with that release.
    """
    if torch.__version__.startswith(("2.11.", "2.12.")):
        threading.Event().wait()


WORLD = (dist.distributed_c10d, "_world")
"""The module and the name of torch's object, in the place of which a RankWorld is put."""


def require_rank_worlds() -> None:
    """Checks that a RankWorld holds all that torch keeps about process groups.

    Raises:
        NotImplementedError: torch lacks a name, or keeps more of its groups for the process than fsdp2 knows.
    """
    load("torch.distributed.distributed_c10d._world", _RANKS)
    for missing in (_World, _isolate_threads):
        if isinstance(missing, Missing):
            missing()
    one, two = RankWorld(), RankWorld()
    for name in (name for name, value in vars(_World).items() if isinstance(value, property)):
        value = None if name == "pg_config_info" else getattr(one, name)
        if isinstance(value, dict | list) and value is getattr(two, name):
            Missing(f"a table of its own in {_World.__name__}.{name}", _RANKS)()


@contextmanager
def threads_as_ranks() -> Iterator[None]:
    """Context: names of process groups belong to the thread that registers them, and meshes that different threads make
    are different ones, which share no entry in DTensor's caches.

    Raises:
        NotImplementedError: torch does not compare the threads of meshes.
    """
    init: Any = DeviceMesh.__init__
    if _THREAD not in init.__code__.co_names:
        Missing(f"torch.distributed.device_mesh.DeviceMesh.{_THREAD}", _RANKS)()
    _isolate_threads(True)

    # torch sets the attribute only where the backend is its own for tests, and to None elsewhere.
    def note(mesh: DeviceMesh, _: object) -> None:
        vars(mesh)[_THREAD] = threading.get_ident()

    setattr(DeviceMesh, _THREAD, property(lambda mesh: vars(mesh).get(_THREAD), note))
    try:
        yield
    finally:
        delattr(DeviceMesh, _THREAD)
        _isolate_threads(False)
