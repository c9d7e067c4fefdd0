"""Tests that each public function refuses a value of a wrong type in each of its arguments, and names the argument.

The value has no length, no order and no methods, and can neither be called nor iterated over: whoever uses it without
a look raises an error that says nothing of the argument, and whoever does not use it has trained on without a word.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import fsdp2
from fsdp2 import FSDPModule, checkpoint, compression, fully_shard, hf
from helpers import fake_world


class Nothing:
    __slots__ = ()

    def __bool__(self) -> bool:
        raise RuntimeError("a function has asked whether this is true")


# What users do not build, and what has no arguments to check: plain data that functions return.
RETURNED = {
    *("FSDPModule", "GradientReductionHandle", "StreamVersion", "UnshardHandle"),
}
# What anything may be given to, or what torch checks when it is used.
ANY = {
    ("AveragedModel", "device"),  # torch's own class, and its own checks
    ("AveragedModel", "avg_fn"),
    ("AveragedModel", "multi_avg_fn"),
    ("AveragedModel", "use_buffers"),
    ("FSDPModule.register_comm_hook", "state"),
    ("ShardPlacementResult", "placement"),  # checked with the parameter for which it is returned
    ("ShardPlacementResult", "mesh_info"),
    ("muon", "params"),  # checked by torch's Optimizer
    ("WholeMatrixOptimizer", "params"),
    ("FSDPModule.set_custom_all_gather", "comm"),  # the error says all_gather: expected a callable
    ("FSDPModule.set_custom_reduce_scatter", "comm"),
    ("hf.save_adapter", "adapter_name"),  # of peft's adapters, which this model has not
    ("compare", "batch"),  # what the model takes; checked by the model
}


FLAGS = (
    *("enable", "free", "keep", "reduce_scatter_unused_params", "requires_all_reduce", "requires_gradient_sync"),
    *("reshard_after_backward", "reshard_after_forward", "unshard_in_backward"),
)


def functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in fsdp2.__all__:
        value = getattr(fsdp2, name)
        if callable(value) and name not in RETURNED:
            yield name, value
    for name in dir(FSDPModule):
        value = getattr(FSDPModule, name)
        if not name.startswith("_") and callable(value) and not hasattr(nn.Module, name):
            yield f"FSDPModule.{name}", value
    for name in ("Compression", "Float8", "Int8", "PowerSGD"):
        yield f"compression.{name}", getattr(compression, name)
    for name in ("load_model", "save_model", "save_adapter", "merge_checkpoint"):
        yield f"hf.{name}", getattr(hf, name)
    for name in ("latest", "load", "save"):
        yield f"checkpoint.{name}", getattr(checkpoint, name)


def cases() -> Iterator[tuple[str, str]]:
    for name, function in functions():
        for argument in arguments_of(function):
            if (name, argument) not in ANY:
                yield name, argument


def arguments_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    found = inspect.signature(function).parameters.values()
    return {each.name: each for each in found if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)}


def values(function: Callable[..., Any], model: Any) -> dict[str, Any]:
    """Returns a right value of each argument that must be given."""
    known: dict[str, Any] = {
        **dict.fromkeys(("self", "model", "module", "module_or_params"), model),
        **{key: [*model.parameters()] for key in ("parameters", "params")},
        "modules": [model],
        "optimizer": torch.optim.AdamW(model.parameters()),
        "reference": nn.Linear(2, 2),
        "update": len,
        "max_norm": 1.0,
        "batch": torch.ones(2),
        "method_name": "forward",
        "path": "unwritten.json",
        "loader": [1, 2, 3],
        "num_ranks": 2,
        "folder": "nowhere",
        "checkpoint": "nowhere",
        "plan": {},
        "mesh": None,
        "along": "data",
        "ranks": 2,
        "level": 1,
        "enabled": True,
        "dtype": torch.bfloat16,
        "nbytes": 10,
        "state": {},
        "max_input_buffers": 1,
        "factor": 2.0,
    }
    known |= dict.fromkeys(FLAGS, True)
    if function in (fsdp2.plan, fsdp2.wrap_groups):
        known["model"] = nn.Linear(2, 2)
    if function in (fully_shard, fsdp2.replicate):
        known["module"] = nn.Linear(3, 3)
    if function is fsdp2.vocab_parallel_embedding:
        known["module"] = nn.Embedding(3, 3)
    return {
        name: known.get(name)
        for name, each in arguments_of(function).items()
        if each.default is inspect.Parameter.empty
    }


def refusal(name: str, argument: str, model: Any) -> str:
    """Returns what is wrong with how a function refuses the argument; "" if nothing is."""
    function = dict(functions())[name]
    given = {**values(function, model), argument: Nothing()}
    own = given.pop("self", None)
    try:
        result = function(own, **given) if own is not None else function(**given)
        if hasattr(result, "__enter__"):
            with result:
                pass
    except (TypeError, ValueError, NotImplementedError) as error:
        text = str(error)
        is_named = argument in text or (argument in ("model", "module", "module_or_params") and "expected" in text)
        return "" if is_named else f"{name}({argument}=): {type(error).__name__} without its name: {text[:160]}"
    except Exception as error:
        return f"{name}({argument}=): {type(error).__name__}: {str(error)[:160]}"
    return f"{name}({argument}=): accepted"


def test_each_argument_is_checked() -> None:
    with fake_world(2):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for module in (model[0], model):
            fully_shard(module)
        wrong = [text for name, argument in cases() if argument != "self" and (text := refusal(name, argument, model))]
    assert not wrong, "\n".join(wrong)


def test_what_is_excused_is_there() -> None:
    names = dict(functions())
    for name, argument in ANY:
        assert argument in arguments_of(names[name]), (name, argument)
    assert {*fsdp2.__all__} >= RETURNED


@pytest.mark.parametrize("value", [-1, float("nan"), "0.1", True])
def test_numbers_of_optimizers(value: Any) -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    for name in ("lr", "momentum", "weight_decay", "eps"):
        with pytest.raises((TypeError, ValueError), match=f"^{name}: expected a number"):
            fsdp2.muon([weight], **{name: value})
