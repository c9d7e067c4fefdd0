"""Follows the advice of `fsdp2.skip_together`, and of what one rank has saved."""

import io
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import fsdp2
from advised.registry import (
    ELSEWHERE,
    backward,
    build,
    follows,
    heard,
    pair,
    refused,
    same_parameters,
    sgd,
    shard,
    train,
    warned,
)

ELSEWHERE['Initialise it with both: init_process_group("cpu:gloo,{}:...")'] = (
    "tests/ranks/test_skip_together.py::test_on_a_device_without_gloo"
)


def skippable(model: Any, inside: Callable[[], object] = lambda: None) -> Any:
    with fsdp2.skip_together(model) as attempt:
        backward(model)
        inside()
    return attempt


@follows(
    "Leave that one first",
    "Call fsdp2.skip_together(model) for each step",
    "Step behind the block, if it was not skipped",
    "Call optimizer.zero_grad() before the block: all micro-batches of a step belong inside",
    "Call set_optimizer_in_backward(None), and step behind the block",
)
def amid_a_block() -> None:
    model, plain = pair()
    optimizer = sgd(model)
    refused(lambda: skippable(model, lambda: skippable(model)))
    refused(lambda: skippable(model, optimizer.step))
    attempt = fsdp2.skip_together(model)
    with attempt:
        pass

    def again() -> None:
        with attempt:
            pass

    refused(again)
    backward(model)
    refused(lambda: skippable(model))
    optimizer.zero_grad()
    model.set_optimizer_in_backward(optimizer)
    refused(lambda: skippable(model))
    model.set_optimizer_in_backward(None)
    assert not skippable(model).skipped
    optimizer.zero_grad()
    train(model, plain)


@follows("another call has used it up. Make a list of it, for all calls", ranks=1)
def a_generator_for_two_calls() -> None:
    def ignored(model: Any, parameters: Any) -> Any:
        model.head.requires_grad_(False)
        fsdp2.fully_shard(model.block, ignored_params=parameters)
        return fsdp2.fully_shard(model, ignored_params=parameters)

    model: Any = build()
    refused(lambda: ignored(model, model.head.parameters()))
    model, plain = build(), build()
    ignored(model, list(model.head.parameters()))
    plain.head.requires_grad_(False)
    train(model, plain)
    assert type(model.head.weight) is nn.Parameter


_WHOLE = (
    "If the other ranks write no files of their own, call torch.distributed.checkpoint.state_dict.get_model_state_dict("
    "model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)) on every rank, and save what the first "
    "one gets; for an optimizer, get_optimizer_state_dict"
)


@follows(
    _WHOLE,
    "Let each rank read its own file; or save a full state dict, of torch.distributed.checkpoint.state_dict."
    "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)), or by torch.distributed.checkpoint."
    "save",
)
def shards_of_one_rank() -> None:
    model, plain = pair()

    def saved(state: Any) -> io.BytesIO:
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        return file

    own = warned(lambda: saved(model.state_dict())) if dist.get_rank() == 0 else saved(model.state_dict())
    data = [own.getvalue()]
    dist.broadcast_object_list(data)
    other = shard(build(seed=1))
    if dist.get_rank() == 0:
        other.load_state_dict(torch.load(io.BytesIO(data[0])))
    else:
        refused(lambda: other.load_state_dict(torch.load(io.BytesIO(data[0]))))
    other.load_state_dict(torch.load(own))
    same_parameters(other, plain)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        loaded = build(seed=1)
        loaded.load_state_dict(torch.load(saved(state)))
        same_parameters(loaded, plain)
    assert heard
