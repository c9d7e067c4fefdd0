"""Follows the advice of errors of optimizers and of plans."""

import copy
import dataclasses
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fsdp2
from advised.registry import (
    Net,
    backward,
    batch,
    build,
    compared,
    follows,
    heard,
    loss_of,
    own,
    pair,
    refused,
    same,
    same_parameters,
    shard,
    train,
    warned,
)
from fsdp2 import fully_shard
from fsdp2.compression import Compression, sum_decoded
from models import TanhBlock


def stack() -> Any:
    return nn.Sequential(*[TanhBlock(5, 7) for _ in range(3)])


# ---- states


# ---- flat optimizers


def train_with(model: Any, plain: Any, make: Any) -> Any:
    """Trains both with an optimizer that `make` builds of parameters. Returns that of `model`."""
    optimizers = make(model.parameters()), make(plain.parameters())
    for step in range(2):
        for each, optimizer, x in zip((model, plain), optimizers, (own(batch(step)), batch(step)), strict=True):
            backward(each, x=x)
            optimizer.step()
            optimizer.zero_grad()
    same_parameters(model, plain, 1e-4)
    return optimizers[0]


class Lamb(torch.optim.Optimizer):
    """Scales each step by the norm of the whole gradient."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            param.add_(param.grad / (param.grad.norm() + 1), alpha=-0.1)


@follows(
    "Use {} as it is; or, if its own step takes no DTensors, another optimizer", "it can't be flat. Use {} as it is"
)
def optimizers_that_are_not_elementwise() -> None:
    model, plain = pair()
    refused(lambda: fsdp2.flatten_optimizer(Lamb(model.parameters())))
    train_with(model, plain, Lamb)
    model, plain = pair()
    refused(lambda: fsdp2.flatten_optimizer(torch.optim.LBFGS(model.parameters())))
    for each, x in ((model, batch()), (plain, batch())):
        optimizer = torch.optim.LBFGS(each.parameters(), lr=0.1, max_iter=2)

        def closure(each: Any = each, x: Tensor = x, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(each(x))
            loss.backward()
            return loss

        optimizer.step(closure)
    same_parameters(model, plain, 1e-4)


@follows(
    "torch's own may count these calls. Call flatten_optimizer without {}",
    "the states have returned to the CPU. Leave one of them out",
    "which one that steps in backward can't. Call flatten_optimizer without it",
)
def steps_that_cannot_run_beside_forward() -> None:
    class Own(torch.optim.SGD):
        pass

    model, plain = pair()
    refused(lambda: fsdp2.flatten_optimizer(Own(model.parameters(), lr=0.1), overlap_with_forward=True))
    flat = fsdp2.flatten_optimizer(Own(model.parameters(), lr=0.1))
    stepper = torch.optim.SGD(plain.parameters(), lr=0.1)
    backward(model)
    backward(plain, x=batch())
    for each in (flat, stepper):
        each.step()
        each.zero_grad()
    same_parameters(model, plain)
    both: Any = {"overlap_with_forward": True, "offload_states": True}
    refused(lambda: fsdp2.flatten_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), **both))
    beside = fsdp2.flatten_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), overlap_with_forward=True)
    refused(lambda: model.set_optimizer_in_backward(beside))
    model.set_optimizer_in_backward(fsdp2.flatten_optimizer(torch.optim.SGD(model.parameters(), lr=0.1)))
    backward(model)
    backward(plain, x=batch())
    stepper.step()
    same_parameters(model, plain)


@follows(
    "flat tensors have no graph. Use it as it is",
    "{} is an optimizer of its own: flatten that one",
    "keeps parameters in {}, too: it can't be flat. Use {} as it is",
    "{}.step was replaced in this optimizer: call flatten_optimizer before that",
    "which a flat optimizer can't do. Use it as it is, without flatten_optimizer",
)
def optimizers_that_cannot_be_flat() -> None:
    class Wraps(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            self.inner = torch.optim.SGD([*params], lr=0.1)
            super().__init__(self.inner.param_groups, self.inner.defaults)

        def step(self) -> None:  # type: ignore[override]
            self.inner.step()

    class Keeps(torch.optim.SGD):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.1)
            self.kept = [*self.param_groups[0]["params"]]

    class Again(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            loss = None
            for _ in range(2 if closure else 1):
                loss = closure() if closure else None
                super().step()
            return loss

    plain = build()
    model = shard(copy.deepcopy(plain))
    refused(lambda: fsdp2.flatten_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, differentiable=True)))
    wraps = Wraps(model.parameters())
    refused(lambda: fsdp2.flatten_optimizer(wraps))
    fsdp2.flatten_optimizer(wraps.inner)
    backward(model)
    wraps.step()
    other = copy.deepcopy(plain)
    backward(other, x=batch())
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    same_parameters(model, other)
    model, other = shard(copy.deepcopy(plain)), copy.deepcopy(plain)
    refused(lambda: fsdp2.flatten_optimizer(Keeps(model.parameters())))
    train_with(model, other, Keeps)
    model, other = shard(copy.deepcopy(plain)), copy.deepcopy(plain)
    replaced = torch.optim.SGD(model.parameters(), lr=0.1)
    step = replaced.step
    replaced.step = lambda *args: step(*args)  # type: ignore[method-assign]
    refused(lambda: fsdp2.flatten_optimizer(replaced))
    flat = fsdp2.flatten_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    before = flat.step
    flat.step = lambda *args: before(*args)
    backward(model)
    flat.step()
    backward(other, x=batch())
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    same_parameters(model, other)
    model, other = shard(copy.deepcopy(plain)), copy.deepcopy(plain)

    def closed(each: Any, optimizer: Any, x: Tensor) -> Any:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(each(x))
            loss.backward()
            return loss

        return optimizer.step(closure)

    refused(lambda: closed(model, fsdp2.flatten_optimizer(Again(model.parameters(), lr=0.1)), own(batch())))
    model = shard(copy.deepcopy(plain))
    closed(model, Again(model.parameters(), lr=0.1), own(batch()))
    closed(other, Again(other.parameters(), lr=0.1), batch())
    same_parameters(model, other)


@follows(
    "Call flatten_optimizer once, with the arguments that you want",
    "Leave capturable out",
)
def optimizers_whose_states_cannot_rest() -> None:
    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    def flat(params: Any) -> Any:
        return fsdp2.flatten_optimizer(Own(params, lr=0.1))

    def capturable(params: Any) -> Any:
        optimizer = torch.optim.AdamW(params)
        optimizer.param_groups[0]["capturable"] = True
        return optimizer

    model, plain = pair()
    refused(lambda: fsdp2.flatten_optimizer(Own(model.parameters(), lr=0.1), offload_states=True))
    train_with(model, plain, flat)
    model, plain = pair()
    first = fsdp2.flatten_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    refused(lambda: fsdp2.flatten_optimizer(first, offload_states=True))
    refused(lambda: fsdp2.flatten_optimizer(capturable(model.parameters()), offload_states=True))

    def resting(params: Any) -> Any:
        return fsdp2.flatten_optimizer(torch.optim.AdamW(params), offload_states=True)

    train_with(model, plain, resting)


# ---- optimizers of whole matrices


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.a, self.head = nn.Embedding(6, 5), nn.Linear(5, 5, bias=False), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.a(self.embed((x[:, 0].abs() * 7).long() % 6)))


def train_split(model: Any, plain: Any, **patterns: Any) -> None:
    """Trains both with Muon for the matrices, and SGD for the rest."""
    for each in (model, plain):
        split = fsdp2.split_matrices(each, **patterns)
        optimizers = [fsdp2.muon(split.matrices, lr=0.05), torch.optim.SGD(split.others, lr=0.1)]
        for step in range(2):
            backward(each, x=batch(step) if each is plain else own(batch(step)))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    same_parameters(model, plain, 1e-4)


@follows(
    "{}: expected each embedding in `exclude` (a lookup is no product with a matrix: leave it to AdamW, with the head)"
)
def embeddings() -> None:
    model, plain = fully_shard(build(Words)), build(Words)
    refused(lambda: fsdp2.split_matrices(model))
    train_split(model, plain, exclude=("embed*", "head*"))
    train_split(fully_shard(build(Words)), build(Words), include=("embed*",), exclude=("head*",))


@follows("Pass the same parameters, in the same order and groups, on all ranks")
def matrices_of_each_rank() -> None:
    model, plain = fully_shard(build(Words)), build(Words)
    matrices = [model.a.weight, model.head.weight]
    ordered = matrices if dist.get_rank() == 0 else matrices[::-1]

    def provoke() -> None:
        optimizer = fsdp2.muon(ordered)
        backward(model)
        optimizer.step()

    refused(provoke)
    train_split(fully_shard(build(Words)), plain, exclude=("embed*", "head*"))


@follows("Call set_optimizer_in_backward(None), and step after backward")
def matrices_in_backward() -> None:
    model, plain = fully_shard(build(Words)), build(Words)
    split = fsdp2.split_matrices(model, exclude=("embed*", "head*"))

    def provoke() -> None:
        model.set_optimizer_in_backward(fsdp2.muon(split.matrices))
        backward(model)

    refused(provoke)
    model = fully_shard(build(Words))
    model.set_optimizer_in_backward(None)
    train_split(model, plain, exclude=("embed*", "head*"))


@follows("Leave it to an elementwise optimizer: split_matrices(..., exclude=({},))", ranks=4)
def matrices_that_tensor_parallelism_cuts() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def made() -> Any:
        model = build(lambda: nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 8)))
        parallelize_module(model, mesh["tp"], {"1": ColwiseParallel(output_layouts=Replicate())})
        return fully_shard(model, mesh=mesh["dp"])

    def provoke() -> Any:
        model = made()
        return fsdp2.muon(fsdp2.split_matrices(model).matrices)

    text = refused(provoke)
    name = text.split("exclude=('")[1].split("'")[0]
    model = made()
    split = fsdp2.split_matrices(model, exclude=(name,))
    optimizers = [fsdp2.muon(split.matrices, lr=0.05), torch.optim.SGD(split.others, lr=0.1)]
    plain = build(lambda: nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 8)))
    split = fsdp2.split_matrices(plain, exclude=(name,))
    optimizers += [fsdp2.muon(split.matrices, lr=0.05), torch.optim.SGD(split.others, lr=0.1)]
    for each in (model, plain):
        loss_of(each(batch())).backward()
    for optimizer in optimizers:
        optimizer.step()
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        same(param.detach().full_tensor(), expected.detach(), "stepped", 1e-4)


# ---- plans


@dataclasses.dataclass(frozen=True)
class Own:
    """Is a codec that reads values, which plans have not. What it sends is exact."""

    exchanges: ClassVar[bool] = True
    feedback: ClassVar[bool] = False

    def packed_dtype(self, summed: torch.dtype) -> torch.dtype:
        return summed

    def sent_nbytes(self, numel: int, summed: torch.dtype) -> int:
        return numel * summed.itemsize

    def encode(self, numbers: Tensor, seed: int) -> Tensor:
        assert numbers.isfinite().all().item()
        return numbers.contiguous().view(torch.uint8)

    def decode(self, wire: Tensor, numbers: Tensor) -> None:
        numbers.copy_(wire.view(numbers.dtype))

    def sum(self, rows: Any, total: Tensor) -> None:
        sum_decoded(self, rows, total)


@follows(
    "Plan with torch.bfloat16 in its place",
    "Plan without it",
)
def planned_with_a_codec() -> None:
    def planned(**options: Any) -> Any:
        policy = fsdp2.MixedPrecisionPolicy(**options)
        return fsdp2.plan(build(stack), ranks=2, batch=lambda: batch(), mp_policy=policy)

    refused(lambda: planned(compression=Compression(reduce_scatter=Own())), NotImplementedError)
    assert planned(compression=Compression(reduce_scatter=torch.bfloat16)).fits
    refused(lambda: planned(compression=Compression(all_gather=Own())), NotImplementedError)
    refused(lambda: planned(compression=Compression(all_reduce=Own())), NotImplementedError)
    assert planned().fits
    for name in ("reduce_scatter", "all_gather"):
        policy = fsdp2.MixedPrecisionPolicy(compression=Compression(**{name: Own()}))
        train(fully_shard(build(stack), mp_policy=policy), build(stack))


@follows(
    "Plan before fully_shard",
    "Plan before parallelize_module",
)
def planned_afterwards() -> None:
    model = fully_shard(build(stack))
    refused(lambda: fsdp2.plan(model, ranks=2))
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    parallel = parallelize_module(build(stack), mesh["tp"], {"0.up": ColwiseParallel()})
    refused(lambda: fsdp2.plan(parallel, ranks=2))
    assert fsdp2.plan(build(stack), ranks=2, batch=lambda: batch()).fits
    compared.append("plans")


@follows("Plan with one of these")
def planned_with_a_choice_by_parameter() -> None:
    def planned(choice: Any) -> Any:
        return fsdp2.plan(build(stack), ranks=2, policy={TanhBlock: {"offload_policy": choice}}, settings=[{}])

    refused(lambda: planned(fsdp2.OffloadBudget(10)), NotImplementedError)
    assert planned(fsdp2.OffloadPolicy()).best.resting > planned(fsdp2.CPUOffloadPolicy()).best.resting
    compared.append("plans")


@follows(
    "Pass a function of the output",
    "Write Machine(network=...), or Machine(ranks_per_machine={}) if all are on one machine",
    "Choose a module around them",
    "it repeats no block. Pass a policy",
    "the policy matches nothing. Pass another",
    "expected blocks to wrap, found none: pass --policy",
    ranks=0,
)
def arguments_of_plans() -> None:
    refused(lambda: fsdp2.plan(stack(), ranks=16, machine=fsdp2.Machine(link=1e9, flops=1e9)))
    for known in ({"network": 1e9}, {"ranks_per_machine": 16}):
        machine = fsdp2.Machine(link=1e9, flops=1e9, **known)
        assert fsdp2.plan(stack(), ranks=16, batch=lambda: batch(), machine=machine).best.time is not None

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = stack()

        def forward(self, x: Tensor) -> Any:
            return {"ids": self.layers(x).argmax(-1), "hidden": [self.layers(x).detach()], "made": self.layers}

    heard.append(str(fsdp2.plan(Counts(), ranks=2, batch=lambda: batch())))
    assert fsdp2.plan(
        Counts(), ranks=2, batch=lambda: batch(), loss=lambda output: output["made"](batch()).sum()
    ).best.step_peak

    class Crossed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Sequential(nn.Sequential(nn.Linear(5, 5)), nn.Linear(5, 5))
            self.b = nn.Sequential(nn.Sequential(nn.Linear(5, 5)), nn.Linear(5, 5))
            self.a[0][0].weight, self.b[0][0].weight = self.b[1].weight, self.a[1].weight

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x))

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.crossed = Crossed()

        def forward(self, x: Tensor) -> Tensor:
            return self.crossed(x)

    crossed = Around()
    chosen = {crossed.crossed.a[0], crossed.crossed.b[0], crossed.crossed.a, crossed.crossed.b}
    try:
        fsdp2.wrap_groups(crossed, lambda module: module in chosen)
    except ValueError as error:
        heard.append(str(error))
    assert [group.module for group in fsdp2.wrap_groups(crossed, Crossed)] == [crossed.crossed]
    assert "Pass a policy" in str(fsdp2.plan(Net(), ranks=2))
    heard.append(str(fsdp2.plan(Net(), ranks=2)))
    assert len(fsdp2.plan(Net(), ranks=2, policy=TanhBlock).groups) == 2
    heard.append(str(warned(lambda: fsdp2.plan(Net(), ranks=2, policy=nn.LSTM))))
    from fsdp2.planning.command import main

    with capture() as printed:
        assert main(["models:TinyLSTM", "--ranks", "4"]) == 1
        assert main(["models:TinyGPT", "--ranks", "4", "--policy", "CausalBlock", "--memory", "1GB"]) == 0
    heard.append(printed.getvalue())
    compared.append("plans")


def capture() -> Any:
    import contextlib
    import io

    return contextlib.redirect_stdout(io.StringIO())


@follows(
    "Use a bool or None for reshard_after_forward",
    "full_params can't copy its stored form. Use it without options",
    "stream_full_params can't gather its stored form. Use full_params",
    ranks=4,
)
def parameters_that_gather_themselves() -> None:
    from ranks.test_extensions import InBF16

    def made() -> Any:
        model = build()
        model.head.weight = nn.Parameter(InBF16(model.head.weight.data))
        return model

    refused(lambda: fully_shard(made(), reshard_after_forward=2))
    plain = build()
    plain.head.weight.data = plain.head.weight.data.bfloat16().float()
    for choice in (True, None):
        model = fully_shard(made(), reshard_after_forward=choice)
        refused(lambda model=model: fsdp2.full_params(model, offload_to_cpu=True).__enter__())
        refused(lambda model=model: [*fsdp2.stream_full_params(model)])
        with fsdp2.full_params(model) as whole:
            torch.testing.assert_close(whole["head.weight"].detach(), plain.head.weight.detach())
        torch.testing.assert_close(model(own(batch())), own(plain(batch())))
    compared.append("gathered")
