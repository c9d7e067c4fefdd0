"""Tests that what torch's FSDP2 offers a program exists here with the same arguments, on whichever torch is installed.

The names are found by introspection: a new release of torch that adds one fails here.
"""

import importlib
import inspect
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import _fully_shard as package

import fsdp2
from fsdp2 import fully_shard
from helpers import fake_world

NAMES = [name for name in package.__all__ if not name.startswith("_")]
CLASSES = [name for name in NAMES if inspect.isclass(getattr(package, name))]
METHODS = [
    (name, method)
    for name in CLASSES
    for method, value in vars(getattr(package, name)).items()
    if not method.startswith("_") and callable(value)
]
# torch's handles are made by its own functions, not by programs.
MADE_BY_TORCH = ("FSDPModule", "UnshardHandle", "GradientReductionHandle")


def arguments(function: Any) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


def takes_the_same(theirs: Any, ours: Any) -> None:
    """Each argument of torch's exists here under its name, at its place, and with its default."""
    own = arguments(ours)
    for i, (name, parameter) in enumerate(arguments(theirs).items()):
        assert name in own, name
        assert own[name].kind == parameter.kind, name
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
            assert list(own).index(name) == i, name
        if type(parameter.default).__module__.startswith("torch.distributed.fsdp"):
            fields = vars(parameter.default)
            assert {key: getattr(own[name].default, key) for key in fields} == fields
        else:
            assert own[name].default == parameter.default, name
    extra = [own[name] for name in own if name not in arguments(theirs)]
    assert all(each.default is not inspect.Parameter.empty for each in extra), extra


@pytest.mark.parametrize("name", NAMES)
def test_names(name: str) -> None:
    assert name in fsdp2.__all__
    if name not in MADE_BY_TORCH:
        takes_the_same(getattr(torch_fsdp, name), getattr(fsdp2, name))


@pytest.mark.parametrize(("name", "method"), METHODS)
def test_methods(name: str, method: str) -> None:
    takes_the_same(getattr(getattr(package, name), method), getattr(getattr(fsdp2, name), method))


def test_all_methods_can_be_called() -> None:
    """With what they take in torch: none is a name without a function behind it. Symmetric memory needs NCCL, as in
    torch.
    """

    class Collective:
        def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        def __call__(self, *_: Any, **__: Any) -> None:
            raise AssertionError("nothing is communicated here")

    with fake_world(2):
        model: Any = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        given: dict[str, tuple[Any, ...]] = {
            "unshard": (),
            "reshard": (),
            "finalize_backward": (),
            "reset_iter_state": (),
            "set_modules_to_forward_prefetch": ([model],),
            "set_modules_to_backward_prefetch": ([model],),
            "set_reduce_scatter_divide_factor": (2.0,),
            "set_gradient_divide_factor": (2.0,),
            "set_reduce_scatter_max_input_buffers": (2,),
            "set_allocate_memory_from_process_group_for_comm": (False,),
            "set_custom_all_gather": (Collective(),),
            "set_custom_reduce_scatter": (Collective(),),
            "set_all_reduce_hook": (lambda gradient: None,),
            "set_post_optim_event": (None,),
            "set_manual_backward_finalization": (False,),
        }
        for name, method in METHODS:
            if name == "FSDPModule" and method != "set_symm_mem_for_comm":
                if method == "set_all_reduce_hook":
                    mesh = init_device_mesh("cpu", (2, 1))
                    fully_shard(nn.Linear(4, 4), mesh=mesh).set_all_reduce_hook(*given[method])
                else:
                    getattr(model, method)(*given.get(method, (True,)))
        fully_shard(nn.Linear(4, 4)).set_allocate_memory_from_process_group_for_comm(True)
        with pytest.raises(RuntimeError, match="symmetric memory is for collectives that run on NCCL"):
            fully_shard(nn.Linear(4, 4)).set_symm_mem_for_comm("NCCL")


def test_what_is_documented_to_come() -> None:
    """A name of the table in STABILITY.md that torch has meanwhile must leave it."""
    from documents import ROOT, table_rows

    rows = table_rows(ROOT / "STABILITY.md")["Names that torch is adding"]
    assert len(rows) >= 5
    modules = [package, package.FSDPModule, torch_fsdp]
    if importlib.util.find_spec("torch.distributed.fsdp.experimental"):
        modules.append(importlib.import_module("torch.distributed.fsdp.experimental"))
    for name in [part.strip("` ") for row in rows for part in row[0].split(",") if "(" not in part]:
        assert not any(hasattr(module, name) for module in modules), name
