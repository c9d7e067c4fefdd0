"""Tests that what codecs keep between steps can be saved and loaded: a resumed run has the bits of one that went on."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import MixedPrecisionPolicy, fully_shard, replicate
from fsdp2.compression import Compression, Int8, PowerSGD
from fsdp2.features.codec_state import load_state_dict, state_dict
from helpers import full, run_checks

KEPT = Int8(feedback=True)


def plain() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 16))


def sharded(**codecs: Any) -> Any:
    model, policy = plain(), MixedPrecisionPolicy(**codecs)
    fully_shard(model[0], mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def replicated(**codecs: Any) -> Any:
    return replicate(plain(), mp_policy=MixedPrecisionPolicy(**codecs))


def hybrid(**codecs: Any) -> Any:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    return fully_shard(plain(), mesh=mesh, mp_policy=MixedPrecisionPolicy(**codecs))


WAYS: dict[str, Callable[[], Any]] = {
    "rounded at random": lambda: sharded(compression=Compression(reduce_scatter=Int8())),
    "with feedback": lambda: sharded(compression=Compression(reduce_scatter=KEPT)),
    "between replicas": lambda: replicated(compression=Compression(all_reduce=KEPT)),
    "of low rank": lambda: replicated(compression=Compression(all_reduce=PowerSGD(rank=2, start=1))),
    "of low rank, soon": lambda: replicated(compression=Compression(all_reduce=PowerSGD(rank=2, start=4))),
    "HSDP": lambda: hybrid(
        compression=Compression(reduce_scatter=KEPT, all_reduce=PowerSGD(rank=2, start=1, min_saving=1))
    ),
}


class Run:
    """Trains a model that `make` returns: `number` steps from step `first` on."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.model = make()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)

    def train(self, first: int, number: int) -> None:
        for step in range(first, first + number):
            rows = torch.Generator().manual_seed(100 * step + dist.get_rank())
            self.model(torch.randn(4, 24, generator=rows)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def weights(self) -> Tensor:
        return torch.cat([full(p).flatten() for p in self.model.parameters()]).detach()

    def resumed(self, make: Callable[[], Any]) -> "Run":
        """Returns another run with these weights and optimizer states, and nothing else."""
        other = Run(make)
        other.model.load_state_dict(self.model.state_dict())
        other.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        return other


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


def goes_on(make: Callable[[], Any]) -> None:
    run = Run(make)
    run.train(0, 3)
    saved = through_a_file(state_dict(run.model))
    resumed, begun_anew = run.resumed(make), run.resumed(make)
    load_state_dict(resumed.model, saved)
    for each in (run, resumed, begun_anew):
        each.train(3, 3)
    assert torch.equal(run.weights(), resumed.weights())
    assert not torch.equal(run.weights(), begun_anew.weights())


def replaced_weights() -> None:
    """Weights that are assigned, not copied, before or behind what codecs have kept."""
    run = Run(WAYS["with feedback"])
    run.train(0, 3)
    resumed = Run(WAYS["with feedback"])
    resumed.model.load_state_dict(copy.deepcopy(run.model.state_dict()), assign=True)
    resumed.model[0].weight = nn.Parameter(resumed.model[0].weight.detach().clone())
    resumed.optimizer = torch.optim.AdamW(resumed.model.parameters(), lr=0.05)
    resumed.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    load_state_dict(resumed.model, state_dict(run.model))
    for each in (run, resumed):
        each.train(3, 3)
    assert torch.equal(run.weights(), resumed.weights())


def refused() -> None:
    run = Run(WAYS["with feedback"])
    run.train(0, 2)
    saved, rank, size = state_dict(run.model), dist.get_rank(), dist.get_world_size()
    states = [None] * size
    dist.all_gather_object(states, saved)
    of_another: Any = states[(rank + 1) % size]
    other_ranks = rf"root: expected what codecs have kept of the ranks \[\({rank}, {size}\)\], got that of"
    other = [
        (WAYS["with feedback"], of_another, other_ranks),
        (
            lambda: sharded(compression=Compression(reduce_scatter=torch.bfloat16)),
            saved,
            "of the codecs .*bfloat16.*, got that of .*Int8",
        ),
        (
            lambda: replicated(compression=Compression(all_reduce=KEPT)),
            saved,
            "groups that begin with .*Shard the model as it was",
        ),
        (lambda: fully_shard(plain()[0]), saved, "groups that begin with"),
    ]
    for make, state, text in other:
        model = make()
        before = state_dict(model)
        with pytest.raises(ValueError, match=text):
            load_state_dict(model, state)
        assert repr(state_dict(model)) == repr(before), "nothing has changed"
    of_replicas = Run(WAYS["of low rank"])
    with pytest.raises(ValueError, match=r"of the sums between replicas .*Int8.*, got that of .*PowerSGD"):
        load_state_dict(replicated(compression=Compression(all_reduce=KEPT)), state_dict(of_replicas.model))
    model = WAYS["with feedback"]()

    def ask(module: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(lambda _: state_dict(model) and None)

    model[0].register_forward_hook(ask)
    with pytest.raises(RuntimeError, match="between steps, not during a backward"):
        model(torch.randn(4, 24)).sum().backward()


def states_of_torchs_hooks() -> None:
    """A PowerSGDState is pickled by itself: buckets have the same numbers in another run."""

    def make(state: PowerSGDState) -> Callable[[], Any]:
        def made() -> Any:
            model = plain()
            replicate(model[0])
            replicate(model).register_comm_hook(state, powerSGD_hook)
            return model

        return made

    def new() -> PowerSGDState:
        return PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)

    state = new()
    run = Run(make(state))
    run.train(0, 4)
    assert state_dict(run.model)
    loaded = copy.deepcopy(state)
    resumed, begun_anew = run.resumed(make(loaded)), run.resumed(make(new()))
    for each in (run, resumed, begun_anew):
        each.train(4, 3)
    assert torch.equal(run.weights(), resumed.weights())
    assert not torch.equal(run.weights(), begun_anew.weights())


def test_what_codecs_keep_is_saved_and_loaded() -> None:
    checks = [(name, lambda make=make: goes_on(make)) for name, make in WAYS.items()]
    run_checks(
        2,
        [
            *checks,
            ("weights that are replaced", replaced_weights),
            ("refused", refused),
            ("states of torch's hooks", states_of_torchs_hooks),
        ],
    )
