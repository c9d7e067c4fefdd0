"""Changes a model in ways other than training: parameters and settings, copies, checkpoints."""

import contextlib
import copy
import io
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

import fsdp2
from random_calls import NUMBERS, WAITS, Draw, call, some_part
from random_models import branches
from sides import Loss, Side

EDITS: dict[str, Callable[[Any], Any]] = {
    "mul_": lambda p: p.mul_(0.9),
    "copy_": lambda p: p.copy_(p * 0.8),
    "row": lambda p: p[-1].fill_(0.1),
    "data": lambda p: p.data.mul_(0.9),
    "masked": lambda p: p.masked_fill_(p > 0.4, 0.3),
    "foreach": lambda p: torch._foreach_mul_([p], 0.95),
}


@call(4)
def edit(side: Side, draw: Draw) -> None:
    some = draw.of("parameter", list(side.params.values()))
    with torch.no_grad():
        EDITS[draw("how", "mul_", list(EDITS), 0.8)](some)
    if not draw.flag("keeps losses", 0.15):
        side.losses.clear()


@call(2)
def freeze(side: Side, draw: Draw) -> None:
    """Freezes or unfreezes parameters."""
    side.reshard()  # a module has other parameters until then
    if any(branch.checkpoints for branch in branches(side.model)):
        side.losses.clear()  # what runs again would save other tensors than before
    trains = draw.flag("thaws", 0.5)
    if draw.flag("a part", 0.3):
        some_part(side, draw).requires_grad_(trains)
    else:
        draw.of("parameter", [p for n, p in side.params.items() if "project" not in n]).requires_grad_(trains)


@call(1)
def replace(side: Side, draw: Draw) -> None:
    side.reshard()  # only sharded parameters may take the place of others
    uses = Counter(p for _, p in side.model.named_parameters(remove_duplicate=False))
    name = draw.of("parameter", [n for n, p in side.params.items() if "project" not in n])
    if uses[side.params[name]] > 1:
        return  # it would have to be replaced everywhere
    prefix, _, own = name.rpartition(".")
    module = side.model.get_submodule(prefix)
    old = getattr(module, own)
    setattr(module, own, nn.Parameter(old.detach() * 0.7, requires_grad=old.requires_grad))
    side.losses.clear()
    side.optimizer = side.make_optimizer(side.params.values())


@call(2)
def save(side: Side, draw: Draw) -> None:
    side.saved = {name: value.detach().clone() for name, value in side.model.state_dict().items()}


@call(2)
def load(side: Side, draw: Draw) -> None:
    if side.saved is not None:
        side.losses.clear()
        side.model.load_state_dict(side.saved)


@call(1)
def full_state_dict(side: Side, draw: Draw) -> None:
    """Writes and loads a full state dict, as other programs do."""
    options = StateDictOptions(full_state_dict=True)
    state = get_model_state_dict(side.model, options=options) if side.is_sharded else side.model.state_dict()
    for name in side.params:
        side.show(name, state[name])
    if draw.flag("loads", 0.5) and len(state) == len(side.params):  # torch loads a shared module by one of its names
        side.losses.clear()
        side.reshard()  # torch mixes whole tensors with full parameters, and fails
        halved = {name: value.detach() * 0.5 for name, value in state.items()}
        set_model_state_dict(side.model, halved, options=options)


@call(1, WAITS)
def copied(side: Side, draw: Draw) -> None:
    """Copies the model; the program continues with the copy."""
    if draw.flag("by pickle", 0.3):
        buffer = io.BytesIO()
        torch.save(side.model, buffer)
        buffer.seek(0)
        side.adopt(torch.load(buffer, weights_only=False))
    else:
        side.adopt(copy.deepcopy(side.model))


def full_params_of(side: Side, **options: Any) -> Any:
    if side.is_sharded:
        return fsdp2.full_params(side.model, **options)
    return contextlib.nullcontext(dict(side.model.named_parameters()))


@call(2)
def full_weights(side: Side, draw: Draw) -> None:
    """Reads full weights, and may write to them."""
    writes = draw.flag("writes", 0.5)
    with torch.no_grad(), full_params_of(side, writeback=writes) as full:
        for name in side.params:
            side.show(name, full[name].double())
        if writes:
            full[draw.of("parameter", list(side.params))].mul_(0.9)
            side.losses.clear()


@call(1)
def loss_of_full(side: Side, draw: Draw) -> None:
    """Returns a penalty on full weights, whose backward comes after these are resharded."""
    with full_params_of(side) as full:
        loss = sum(full[name].square().sum().double() for name in side.params)
    side.losses.append(Loss(0.01 * loss))


# ---- settings, and by hand


def set_on(side: Side, draw: Draw, method: str, *args: Any, **options: Any) -> None:
    """Returns the module on which to set something: the root, or a module inside."""
    number = draw("module", 0, NUMBERS, 0.5)
    if side.is_sharded:
        modules = side.sharded_modules()
        getattr(modules[number % len(modules)], method)(*args, **options)


@call(4)
def sync(side: Side, draw: Draw) -> None:
    method = draw("method", "set_requires_gradient_sync", ("set_requires_all_reduce",), 0.2)
    set_on(side, draw, method, draw.flag("on", 0.6), recurse=not draw.flag("itself alone", 0.3))


SETTINGS: list[tuple[str, Any]] = [
    ("set_reshard_after_forward", False),
    ("set_reshard_after_forward", True),
    ("set_reshard_after_backward", False),
    ("set_reshard_after_backward", True),
    ("set_keep_unsharded_storage", True),
    ("set_keep_unsharded_storage", False),
    ("set_free_viewed_storage", True),
    ("set_force_sum_reduction_for_comms", True),
    ("set_separate_reduce_scatter_group", True),
    ("set_reduce_scatter_max_input_buffers", 3),
    ("set_modules_to_forward_prefetch", []),
    ("set_modules_to_backward_prefetch", []),
]


@call(4)
def setting(side: Side, draw: Draw) -> None:
    method, value = draw("what", SETTINGS[0], SETTINGS, 0.9)
    set_on(side, draw, method, value)


@call(3)
def unshard(side: Side, draw: Draw) -> None:
    set_on(side, draw, "unshard", async_op=draw.flag("without waiting", 0.4))


@call(3)
def reshard(side: Side, draw: Draw) -> None:
    if draw.flag("all", 0.4):
        side.reshard()
    else:
        set_on(side, draw, "reshard")
