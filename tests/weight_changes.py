"""Has ways to change the weights of a model (`scenarios.Uneven`): what has been gathered before is stale then."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp2 import FSDPModule

Change = Callable[[Any], object]


def values_like(param: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(param.shape, generator=generator, dtype=param.dtype)
    return distribute_tensor(values, param.device_mesh, param.placements) if isinstance(param, DTensor) else values


def local(param: Any) -> Tensor:
    return param.to_local() if isinstance(param, DTensor) else param


def optimizer_step(build: Callable[..., torch.optim.Optimizer], **options: Any) -> Change:
    def change(model: nn.Module) -> None:
        build([p for p in model.parameters() if p.grad is not None], lr=0.1, **options).step()

    return change


def in_place(change: Callable[[Any], object]) -> Change:
    """Of each parameter, without grad."""

    def change_all(model: nn.Module) -> None:
        with torch.no_grad():
            for param in model.parameters():
                change(param)

    return change_all


def step_by_hand(param: Any) -> None:
    if param.grad is not None:
        local(param).sub_(0.1 * local(param.grad))


def load(model: nn.Module, assign: bool = False) -> None:
    state = {name: values_like(param, seed=3) for name, param in model.state_dict().items()}
    model.load_state_dict(state, assign=assign)


def replace(model: Any) -> None:
    for owner in (model.twice.up, model.head):
        owner.weight = nn.Parameter(values_like(owner.weight, seed=4))


def swap(model: Any) -> None:
    torch.utils.swap_tensors(model.head.weight, nn.Parameter(values_like(model.head.weight, seed=4)))


@torch.no_grad()
def foreach_of_two(model: nn.Module) -> None:
    params = list(model.parameters())
    torch._foreach_lerp_(params, [values_like(p, seed=2) for p in params], 0.1)


def assign_data(param: Tensor) -> None:
    param.data = param.data * 0.9


def in_inference_mode(model: nn.Module) -> None:
    with torch.inference_mode():
        for param in model.parameters():
            param.mul_(0.9)


def write_to_kept_state(model: nn.Module) -> None:
    """As `dcp.load` does into a state dict that was taken before."""
    if "kept_state" not in vars(model):
        vars(model)["kept_state"] = model.state_dict()
    for value in vars(model)["kept_state"].values():
        local(value).mul_(0.9)


def uncounted(model: nn.Module) -> None:
    """Operations through a plain tensor's `.data` leave versions as they are: users call reshard."""
    in_place(lambda p: local(p).data.mul_(0.9))(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


CHANGES: dict[str, Change] = {
    "SGD foreach": optimizer_step(torch.optim.SGD, foreach=True),
    "SGD one by one": optimizer_step(torch.optim.SGD, foreach=False),
    "AdamW foreach": optimizer_step(torch.optim.AdamW, foreach=True),
    "AdamW fused": optimizer_step(torch.optim.AdamW, fused=True),
    "Adagrad": optimizer_step(torch.optim.Adagrad),
    "by hand, on the local tensors": in_place(step_by_hand),
    "by hand, on the DTensors": in_place(lambda p: p.sub_(0.1 * p.grad) if p.grad is not None else None),
    "mul_": in_place(lambda p: p.mul_(0.9)),
    "mul_ of a detached one": in_place(lambda p: p.detach().mul_(0.9)),
    "mul_ of a view": in_place(lambda p: p.view(p.shape).mul_(0.9)),
    "out=": in_place(lambda p: torch.mul(p, 0.9, out=p)),
    "mul_ in inference mode": in_inference_mode,
    "foreach on the local tensors": lambda model: torch._foreach_mul_(
        [local(p).detach() for p in model.parameters()], 0.9
    ),
    "copy_": in_place(lambda p: p.copy_(values_like(p, seed=2))),
    "copy_ to a state dict": lambda model: [p.copy_(values_like(p, seed=2)) for p in model.state_dict().values()],
    "init": in_place(lambda p: nn.init.constant_(p, 0.3)),
    "load_state_dict": load,
    "load_state_dict(assign)": lambda model: load(model, assign=True),
    "load_state_dict of a part": lambda model: load(model.twice.up),  # type: ignore[arg-type]
    "to(dtype) and back": lambda model: model.float().double(),
    "to(dtype) of a part, and back": lambda model: model.head.float().double(),  # type: ignore[union-attr]
    "replaced": replace,
    "swapped": swap,
    "the local tensor in a state dict": lambda model: [local(p).mul_(0.9) for p in model.state_dict().values()],
    "the local tensor in a state dict that is kept": write_to_kept_state,
    "the local tensor of a detached one": in_place(lambda p: local(p.detach()).mul_(0.9)),
    "the local tensor of a view": in_place(lambda p: local(p.view(p.shape)).mul_(0.9)),
    "the local tensor of a transposed one": in_place(lambda p: local(p.transpose(0, -1)).mul_(0.9)),
    ".data": in_place(lambda p: p.data.mul_(0.9)),
    ".data of a detached one": in_place(lambda p: p.detach().data.mul_(0.9)),
    "copy_ to .data": in_place(lambda p: p.data.copy_(values_like(p, seed=2))),
    ".data assigned": in_place(assign_data),
    "foreach": lambda model: torch._foreach_mul_([p.detach() for p in model.parameters()], 0.9),
    "foreach of two lists": foreach_of_two,
    "foreach of .data": lambda model: torch._foreach_mul_([p.data for p in model.parameters()], 0.9),
    "the local tensor's .data, and resharded": uncounted,
    "freezing": lambda model: model.twice.requires_grad_(False),  # type: ignore[union-attr]
}
