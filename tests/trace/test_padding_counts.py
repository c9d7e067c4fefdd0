"""Tests that the padding report equals what collectives send, and which part of it is logged on which rank."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.meters import WireMeter
from fsdp2 import MixedPrecisionPolicy, cheapest_placement, fully_shard, replicate
from fsdp2.codecs import Compression
from fsdp2.tools.padding import Padded
from fsdp2.tools.padding_log import _examined
from helpers import fake_world, padding_report

POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    "bf16 wire": MixedPrecisionPolicy(
        torch.bfloat16, torch.float32, compression=Compression(reduce_scatter=torch.bfloat16)
    ),
}
NUMEL = 128 * 48 * 40 + 128 * 48 + 5


class Experts(nn.Module):
    """128 of them, a router, a bias of few elements, and a frozen parameter."""

    def __init__(self, experts: int = 128) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.ones(experts, 48, 40))
        self.router = nn.Parameter(torch.ones(experts, 48))
        self.bias = nn.Parameter(torch.ones(5))
        self.frozen = nn.Parameter(torch.ones(3, 7), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * sum(param.sum() for param in self.parameters())


class Net(nn.Module):
    def __init__(self, experts: int = 128) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts(experts) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(7))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.scale


def shard(model: Any, **options: Any) -> Any:
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("world_size", [2, 3, 7, 96, 256, 512])
def test_the_report_equals_the_sent_bytes(world_size: int, policy: str) -> None:
    """All that a rank puts into collectives, times their number, is what the report says of all groups together."""
    with fake_world(world_size):
        for place in (None, cheapest_placement()):
            model = shard(Net(), mp_policy=POLICIES[policy], shard_placement_fn=place, reshard_after_forward=False)
            with WireMeter() as wire:
                model(torch.ones(1)).sum().backward()
            sent = {"all_gather": 0, "reduce_scatter": 0, "all_to_all": 0}
            for each in wire.collectives:
                sent[each.kind] += world_size * each.payload_bytes
            reduced = sent["reduce_scatter"] + sent["all_to_all"] // (world_size - 1)  # counted once for each peer
            report = padding_report(model)
            assert sum(each.gather.padded_nbytes for each in report) == sent["all_gather"]
            assert sum(each.reduce.padded_nbytes for each in report) == reduced
            compute, travels = {"fp32": (4, 4), "bf16": (2, 4), "bf16 wire": (2, 2)}[policy]
            assert [each.gather.nbytes for each in report] == [7 * compute, *[(NUMEL + 21) * compute] * 2]
            assert [each.reduce.nbytes for each in report] == [7 * travels, *[NUMEL * travels] * 2]


def test_few_experts_are_twice_their_size_unless_planned() -> None:
    """48 divides by 16 ranks where 9 experts do not."""
    with fake_world(16):
        plain, planned = (
            padding_report(shard(Net(9), shard_placement_fn=place))[1] for place in (None, cheapest_placement())
        )
    assert (plain.name, plain.num_ranks) == ("layers.0", 16)
    assert [each.name for each in plain.parameters] == [
        f"layers.0.{name}" for name in ("up", "router", "frozen", "bias")
    ]
    up = plain.parameters[0]
    assert (up.shape, up.dim, up.cheapest_dim) == ((9, 48, 40), 0, 1)
    assert up.gather == Padded(9 * 48 * 40 * 4, 16 * 48 * 40 * 4)
    assert up.cheapest_gather == Padded(9 * 48 * 40 * 4, 9 * 48 * 40 * 4)
    assert round(plain.gather.ratio, 1) == round(plain.reduce.ratio, 1) == 1.8
    assert round(planned.gather.ratio, 1) == round(planned.reduce.ratio, 1) == 1.0
    assert "up" not in " ".join(each.name for each in planned.parameters)
    assert str(plain).splitlines()[1] == (
        "  layers.0.up (9, 48, 40): 1.78x (0.1 of 0.1 MiB) along dim 0, 1.00x (0.1 of 0.1 MiB) along dim 1"
    )


def test_the_report_names_the_dims_that_the_planner_takes() -> None:
    """Which knows how a parameter is stored, not in which dtype it will compute."""
    with fake_world(256):
        for columns, dim in ((2880, 1), (300, 0)):
            for place, policy in ((None, POLICIES["bf16"]), (cheapest_placement(), POLICIES["bf16"])):
                (report,) = padding_report(fully_shard(Wide(128, columns), mp_policy=policy, shard_placement_fn=place))
                weight = report.parameters[0]
                assert (weight.name, weight.cheapest_dim) == ("weight", dim)
                assert place is None or weight.dim == dim


def test_on_meta_the_report_is_the_same() -> None:
    with fake_world(256):
        with torch.device("meta"):
            model = shard(Net())
        before = padding_report(model)
        model.to_empty(device="cpu")
        assert padding_report(model) == before
        model(torch.ones(1))
        assert padding_report(model) == before


def test_it_follows_what_is_frozen_and_what_dtype_parameters_have() -> None:
    with fake_world(3):
        model = fully_shard(Experts(4))
        (before,) = padding_report(model)
        model.up.requires_grad_(False)
        model.to(torch.float64)
        (after,) = padding_report(model)
        assert after.gather.nbytes == 2 * before.gather.nbytes
        assert after.reduce.nbytes == 8 * (4 * 48 + 5)


def test_one_rank_and_replicas_gather_nothing() -> None:
    with fake_world(1):
        (report,) = padding_report(fully_shard(Experts(3)))
    assert (report.gather, report.reduce, report.parameters) == (Padded(0, 0), Padded(0, 0), ())
    assert report.gather.ratio == 1
    with fake_world(4):
        assert padding_report(replicate(Experts(3)))[0].num_ranks == 1
        (hsdp,) = padding_report(fully_shard(Experts(3), mesh=init_device_mesh("cpu", (2, 2))))
        (alone,) = padding_report(fully_shard(Experts(3), mesh=init_device_mesh("cpu", (4,))))
    assert hsdp.num_ranks == 2
    assert hsdp.parameters[0].gather.ratio == alone.parameters[0].gather.ratio == 4 / 3
    with fake_world(4):
        assert padding_report(nn.Linear(2, 2)) == []


# ---- what is logged


class Wide(nn.Module):
    """`rows` rows of 64 KiB each, and a bias that isn't worth a word."""

    def __init__(self, rows: int, columns: int = 16 * 1024) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns, device="meta"))
        self.bias = nn.Parameter(torch.empty(5, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.fixture(autouse=True)
def _nothing_said_yet() -> None:
    _examined.clear()


def test_large_padding_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with fake_world(512):
        model = nn.Sequential(*(Wide(100) for _ in range(3)))
        for layer in model:
            fully_shard(layer)
    assert caplog.messages == [
        "fully_shard(Wide): padding makes each gather over 512 ranks 5.12x (32.0 of 6.3 MiB), most of it by weight "
        "(100, 16384): 5.12x (32.0 of 6.2 MiB) along dim 0, 1.00x (6.2 of 6.2 MiB) along dim 1. Pass "
        "shard_placement_fn=fsdp2.cheapest_placement(mesh)."
    ]


def test_small_padding_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Neither a small share, nor a large one of little, nor what the planner has avoided."""
    with fake_world(512):
        fully_shard(Wide(512 * 5 - 300))
        fully_shard(Wide(100, 4 * 1024))
        fully_shard(Wide(100), shard_placement_fn=cheapest_placement())
        replicate(Wide(100))
    assert caplog.messages == []


def test_without_a_better_dim_fewer_ranks_are_advised(caplog: pytest.LogCaptureFixture) -> None:
    with fake_world(512):
        module = Wide(1)
        module.weight = nn.Parameter(torch.empty(300, 300, 300, device="meta"))
        fully_shard(module)
    (text,) = caplog.messages
    assert "No dim of these divides better" in text


@pytest.mark.parametrize(("rank", "says"), [(0, True), (1, False), (255, False), (256, False)])
def test_the_first_rank_of_a_mesh_logs(caplog: pytest.LogCaptureFixture, rank: int, says: bool) -> None:
    """One of all: 512 would say the same."""
    with fake_world(512, rank):
        fully_shard(Wide(100, 64 * 1024), mesh=init_device_mesh("cpu", (2, 256)))
    assert bool(caplog.messages) == says
