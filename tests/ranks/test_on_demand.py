"""Tests `accumulate(on_demand=True)`: gradients have the bits of `accumulate`, no rank waits for another inside of the
block, nothing is read while it is written, and what it can't do is refused on all ranks.
"""

import copy
import datetime
import gc
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import test_extensions
import torch
import torch.distributed as dist
from test_accumulate import Part, build, draw, hsdp, loss_sum, plain_backward, same, shard, step
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import fsdp2
from benchmarks import lengths
from documents import ROOT, code_blocks, shared_lines
from fsdp2 import MixedPrecisionPolicy, fully_shard, replicate
from fsdp2.engine.state import groups_below
from fsdp2.features import on_demand
from fsdp2.features.accumulate import find_active
from helpers import NIGHTLY, assert_same, full, run_checks, run_ranks, world_sizes
from models import FrozenMix, OddMLP, SkippedModule, TinyGPT

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def bits(tensor: Any) -> Tensor:
    return tensor.to_local().view(torch.uint8)


def has_bits_of(apply: Callable[[Any], Any], make: Any = TinyGPT, double: bool = True, counts: bool = False) -> None:
    """Three steps: gradients and parameters have the bits of those without `on_demand`."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    models = []
    for _ in range(2):
        torch.manual_seed(1)
        models.append(apply(make().double() if double else make()))
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
    for number in range(3):
        parts: list[Part] = draw(make(), number, 3, ranks)[rank]
        if not double:
            parts = [(rows.float() if rows.is_floating_point() else rows, each.float()) for rows, each in parts]
        known = len(parts) if counts else None
        own, other = (step(models[i], parts, on_demand=bool(i), num_batches=known) for i in range(2))
        assert (own.mean_loss, own.total_weight) == (other.mean_loss, other.total_weight)
        compared = 0
        for (name, param), theirs in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
            assert (param.grad is None) == (theirs.grad is None), name
            if param.grad is not None:
                assert torch.equal(bits(param.grad), bits(theirs.grad)), name
                compared += 1
        assert compared
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for param, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(bits(param), bits(theirs))


def keeping(model: Any) -> Any:
    sharded = shard(model, reshard_after_forward=False)
    sharded.set_reshard_after_backward(False)
    return sharded


def checked(model: Any) -> Any:
    sharded = shard(model)
    sharded.set_debug_level(1)
    return sharded


def recomputing(model: Any) -> Any:
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return shard(model)


def encoded(model: Any) -> Any:
    policy = MixedPrecisionPolicy(gather_codec=fsdp2.codecs.Int8())
    return shard(model, mp_policy=policy)


@pytest.mark.parametrize("ranks", world_sizes(2, nightly=[3]))
def test_gradients_have_the_same_bits(ranks: int) -> None:
    import fsdp2.codecs  # noqa: F401, before the fork

    cases = [(make.__name__, partial(has_bits_of, shard, make)) for make in (OddMLP, TinyGPT, FrozenMix, SkippedModule)]
    if ranks == 2 or NIGHTLY:
        cases += settings_of_cases()
    run_checks(ranks, cases)


def settings_of_cases() -> list[tuple[str, Callable[[], None]]]:
    return [
        ("counted", partial(has_bits_of, shard, counts=True)),
        ("kept", partial(has_bits_of, keeping)),
        ("replicate", partial(has_bits_of, partial(shard, apply=replicate))),
        ("bf16", partial(has_bits_of, partial(shard, mp_policy=BF16), double=False)),
        ("never resharded in forward", partial(has_bits_of, partial(shard, reshard_after_forward=False))),
        ("debug level", partial(has_bits_of, checked)),
        ("recomputed", partial(has_bits_of, recomputing)),
        ("encoded", partial(has_bits_of, encoded, double=False)),
    ]


def test_replicas() -> None:
    run_checks(4, [("HSDP", partial(has_bits_of, lambda model: shard(model, **hsdp())))])


def test_one_rank() -> None:
    run_checks(1, [("one rank", partial(has_bits_of, shard))])


def differing_numbers(counts: bool) -> None:
    """Ranks run 1, 9, 17 micro-batches: past the times at which ranks compare."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, plain = shard(build(TinyGPT)), build(TinyGPT)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    for number in range(2):
        parts = [own[: 8 * i + 1] for i, own in enumerate(draw(build(TinyGPT), number, 17, ranks))]
        acc = step(model, parts[rank], on_demand=True, num_batches=len(parts[rank]) if counts else None)
        expected = plain_backward(plain, parts)
        assert (acc.mean_loss, acc.total_weight) == pytest.approx(expected, rel=1e-12)
        same(model, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_ranks_may_have_different_numbers_of_micro_batches() -> None:
    run_checks(3, [(str(counts), partial(differing_numbers, counts)) for counts in (False, True)])


# ---- who waits for whom


def test_a_rank_finishes_its_micro_batches_before_another_begins() -> None:
    def body(rank: int, ranks: int) -> None:
        model, store = shard(build(TinyGPT)), dist.distributed_c10d._get_default_store()
        store.set_timeout(datetime.timedelta(seconds=20))  # were gathers meetings, rank 0 would not get there
        parts = draw(build(TinyGPT), 0, 3, ranks)[rank]
        for first in (0, 1):
            with fsdp2.accumulate(model, on_demand=True) as acc:
                if rank != first:
                    store.wait([f"rank {first} is done"])
                for part in parts:
                    acc.backward(loss_sum(model, part), weight=part[1].sum())
                model.eval()
                with torch.no_grad():
                    for _ in range(rank):  # only some ranks evaluate
                        model(parts[0][0])
                model.train()
                store.set(f"rank {rank} is done", "")
            model.zero_grad()
            dist.barrier()
            store.delete_key(f"rank {rank} is done")

    run_ranks(2, body, timeout=60)


def test_no_rank_writes_while_another_reads() -> None:
    """A rank that leaves a block by an error, and begins the next one, waits there for ranks that still read."""

    def body(rank: int, ranks: int) -> None:
        model, plain = shard(build(TinyGPT)), build(TinyGPT)
        parts = draw(build(TinyGPT), 0, 2, ranks)
        step(model, parts[rank], on_demand=True)
        plain_backward(plain, parts)
        same(model, plain)
        model.zero_grad()
        store = dist.distributed_c10d._get_default_store()

        def fail_inside() -> None:
            with fsdp2.accumulate(model, on_demand=True) as acc:
                if rank == 1:
                    acc.backward(loss_sum(model, parts[rank][0]), weight=1)
                    store.wait(["changed"])  # rank 0 has changed its shard, and begins the next block
                    time.sleep(0.3)
                    for read, param in zip(full_weights(model), plain.parameters(), strict=True):
                        assert torch.equal(read, param)
                raise KeyError

        with pytest.raises(KeyError):
            fail_inside()
        multiply(model)
        multiply(plain)
        if rank == 0:
            store.set("changed", "")
        plain.zero_grad()
        step(model, parts[rank], on_demand=True)
        plain_backward(plain, parts)
        same(model, plain)

    run_ranks(2, body)


def full_weights(model: Any) -> list[Tensor]:
    """What the next forward would compute with: gathered on demand, on this rank alone."""
    groups = groups_below(model)
    for group in groups:
        group.unshard()
    found = {id(p.sharded): p.unsharded.detach().clone() for group in groups for p in group.params}
    for group in groups:
        group.reshard()
    return [found[id(param)] for param in model.parameters()]


def test_whole_parameters_inside_of_a_block() -> None:
    def body(rank: int, ranks: int) -> None:
        model, plain = shard(build(TinyGPT)), build(TinyGPT)
        expected = dict(plain.named_parameters())
        with fsdp2.accumulate(model, on_demand=True) as acc:
            parts = draw(build(TinyGPT), 0, 1, ranks)[rank]
            acc.backward(loss_sum(model, parts[0]), weight=parts[0][1].sum())
            with fsdp2.full_params(model):
                for name, param in model.named_parameters():
                    assert_same(param, expected[name], rtol=0, atol=0, name=name)
            for bucket in fsdp2.stream_full_params(model):
                for name, tensor in bucket.tensors.items():
                    assert_same(tensor, expected[name], rtol=0, atol=0, name=name)
            for name, param in model.state_dict().items():
                assert_same(full(param), expected[name], rtol=0, atol=0, name=name)

    run_ranks(2, body)


# ---- after errors, and what is left


def test_a_step_that_is_skipped() -> None:
    def body(rank: int, ranks: int) -> None:
        model, plain = shard(build(TinyGPT)), build(TinyGPT)
        parts = draw(build(TinyGPT), 0, 3, ranks)
        for fails in (True, False):
            accumulation = fsdp2.accumulate(model, on_demand=True)
            with fsdp2.skip_together(model, catch=KeyError) as skippable, accumulation as acc:
                for i, part in enumerate(parts[rank]):
                    if fails and i == rank == 1:
                        raise KeyError("a bad sample")
                    acc.backward(loss_sum(model, part), weight=part[1].sum())
            assert skippable.skipped == fails
        plain_backward(plain, parts)
        same(model, plain)

    run_ranks(2, body)


def shared_maps() -> list[list[str]]:
    return [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "/fsdp2-" in line]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_nothing_is_left() -> None:
    def body(rank: int, ranks: int) -> None:
        model = shard(build(TinyGPT))
        before = [group.comms for group in groups_below(model)]
        for _ in range(2):
            step(model, draw(build(TinyGPT), 0, 2, ranks)[rank], on_demand=True)
            assert [group.comms for group in groups_below(model)] == before
            model.zero_grad()
        dist.barrier()
        maps = shared_maps()
        assert {fields[-1] for fields in maps} == {"(deleted)"}
        assert len({fields[-2] for fields in maps}) == ranks  # each once, also after a second block
        copied = copy.deepcopy(model)
        del model, before
        gc.collect()
        assert not shared_maps(), "they go with the model"
        step(copied, draw(build(TinyGPT), 0, 2, ranks)[rank], on_demand=True)

    run_ranks(2, body)


# ---- what is refused


def refuses(model: Any, kind: type[Exception], match: str) -> None:
    with pytest.raises(kind, match=match), fsdp2.accumulate(model, on_demand=True):
        pytest.fail("the block began")
    assert find_active(groups_below(model)[0].root) is None


def writes_inside(write: Callable[[Any], None]) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, plain = shard(build(TinyGPT)), build(TinyGPT)
    parts = draw(build(TinyGPT), 0, 2, ranks)

    def write_inside() -> None:
        with fsdp2.accumulate(model, on_demand=True) as acc:
            acc.backward(loss_sum(model, parts[rank][0]), weight=1)
            write(model)
            model(parts[rank][0][0])

    with pytest.raises(RuntimeError, match=r"written to, or replaced, inside of a block of accumulate\(on_demand"):
        write_inside()
    multiply(plain)
    step(model, parts[rank], on_demand=True)
    plain_backward(plain, parts)
    same(model, plain)


@torch.no_grad()
def multiply(model: Any) -> None:
    for param in model.parameters():
        param.mul_(2)


@torch.no_grad()
def load(model: Any) -> None:
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()}, assign=True)


def test_writes_inside_are_refused() -> None:
    run_checks(2, [(write.__name__, partial(writes_inside, write)) for write in (multiply, load)])


class _Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(self.norm(x))
        return y


class _Gather:
    def allocate(self, size: Any, *, dtype: Any, device: Any) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool) -> Any:
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


def refusals() -> None:
    model = _Normed()
    fully_shard(model)
    refuses(model, NotImplementedError, "average the running statistics of norm in each forward")
    model.eval()
    with fsdp2.accumulate(model, on_demand=True) as acc:
        acc.backward(model(torch.ones(2, 4)).sum(), weight=1)
    own = shard(build())
    own.set_custom_all_gather(_Gather())
    refuses(own, NotImplementedError, "set_custom_all_gather")
    conditional = build()
    fully_shard(next(conditional.children()), conditional=True)
    refuses(fully_shard(conditional), NotImplementedError, "conditional modules")
    joined = shard(build())
    with fsdp2.join(joined):
        refuses(joined, NotImplementedError, "blocks of fsdp2.join")
    with pytest.raises(ValueError, match="on_demand: expected False"):
        fsdp2.accumulate(own, on_demand=True, sync="each")
    with pytest.raises(TypeError, match="on_demand"):
        fsdp2.accumulate(own, on_demand=1)  # type: ignore[arg-type]


def collectives_changed_inside() -> None:
    model, rows = shard(build()), build().example(rows=2, seed=0).double()

    def change() -> None:
        with fsdp2.accumulate(model, on_demand=True):
            model.set_debug_level(1)
            model(rows)

    with pytest.raises(RuntimeError, match="how it communicates was changed inside"):
        change()
    with fsdp2.accumulate(model, on_demand=True) as acc:
        acc.backward(model(rows).sum(), weight=2)


def gathers_itself() -> None:
    refuses(fully_shard(test_extensions.Model(6, test_extensions.InBF16)), NotImplementedError, "which gathers itself")


def restored_among_neighbours() -> None:
    refuses(shard(build(), reshard_after_forward=2), NotImplementedError, "restores parameters among neighbours")


def apart() -> None:
    """Ranks on several machines: one has no such file."""
    model, rank = shard(build()), dist.get_rank()
    opened = on_demand._map_file
    with mock.patch.object(on_demand, "_map_file", lambda *args: None if rank else opened(*args)):
        refuses(model, NotImplementedError, "expected ranks that share memory")
    step(model, draw(build(), 0, 2, dist.get_world_size())[rank], on_demand=True)


def short_of_memory() -> None:
    model, rank = shard(build()), dist.get_rank()
    made = on_demand._make_file

    def fail(nbytes: int) -> str:
        if rank == 1:
            raise OSError(28, "No space left on device")
        return made(nbytes)

    before = {*on_demand._folder().glob("fsdp2-*")}
    with mock.patch.object(on_demand, "_make_file", fail):
        refuses(model, RuntimeError, "rank 1 could not get .* bytes of shared memory .*No space left")
    dist.barrier()
    assert {*on_demand._folder().glob("fsdp2-*")} <= before
    step(model, draw(build(), 0, 2, dist.get_world_size())[rank], on_demand=True)


def differs() -> None:
    """Ranks compare when they publish: here, the weights that they start from."""
    torch.manual_seed(dist.get_rank())
    refuses(shard(TinyGPT()), RuntimeError, "rank")


def test_refusals() -> None:
    cases = {"settings": refusals, "apart": apart, "memory": short_of_memory, "collectives": collectives_changed_inside}
    run_checks(2, [*cases.items(), ("differ", differs), ("gathers itself", gathers_itself)])
    run_checks(4, [("neighbours", restored_among_neighbours)])


def test_a_simulated_group_is_refused() -> None:
    from helpers import fake_world

    with fake_world(4):
        refuses(shard(build()), NotImplementedError, "expected parameters on CPUs of one machine")


def test_a_rank_that_does_not_serve() -> None:
    """One rank has on_demand=True, and the other one has not: both raise."""

    def body(rank: int, ranks: int) -> None:
        model = shard(build(TinyGPT))
        parts = draw(build(TinyGPT), 0, 2, ranks)[rank]
        step(model, parts)
        model.zero_grad()
        with pytest.raises(RuntimeError, match="out of step"):
            step(model, parts, on_demand=rank == 0)

    run_ranks(2, body)


def test_mesh_of_two_axes_that_shard() -> None:
    def body(rank: int, ranks: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        has_bits_of(
            lambda model: shard(model, mesh=mesh, dp_mesh_dims=fsdp2.DataParallelMeshDims(shard=("outer", "inner")))
        )

    run_ranks(4, body)


def test_the_guide() -> None:
    """Its code runs as it stands, and gives the parameters of one process with all sequences."""
    ground = shared_lines()
    (snippet,) = code_blocks(ROOT / "examples" / "guides" / "unequal-lengths.md")

    def body(rank: int, ranks: int) -> None:
        names: dict[str, Any] = {"__name__": "guide"}
        for code in (ground, snippet):
            exec(code.compiled(), names)
        torch.manual_seed(0)
        plain, sequences = names["Model"](), names["sequences"]
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        total = sum(each.numel() for each in sequences)
        loss = sum(names["loss_of"](plain, each) * each.numel() for each in sequences) / total
        loss.backward()
        optimizer.step()
        assert (names["acc"].mean_loss, names["acc"].total_weight) == (pytest.approx(loss.item(), rel=1e-5), total)
        for (name, param), expected in zip(names["model"].named_parameters(), plain.parameters(), strict=True):
            assert_same(full(param), expected, rtol=1e-3, atol=1e-4, name=name)  # a step of AdamW is 1e-2
        assert len({len(own) for own in names["parts"]}) == 2, "ranks have different numbers of micro-batches"

    run_ranks(2, body)


def test_the_benchmark() -> None:
    """With ranks that do not sleep: all ways give the same bits, and on demand takes less memory than kept weights."""

    def body(rank: int, ranks: int) -> None:
        sizes = {"blocks": 8, "dim": 256}
        with mock.patch.multiple(lengths, SECONDS_OF_A_TOKEN=0, FOR_MEMORY=sizes):
            first, *steps, memory = lengths.measure(rank, ranks, quick=True)
        assert first.values == dict.fromkeys(("fsdp2", "half kept", "kept", "on demand"), 0)
        assert memory.values["on demand"] < memory.values["kept"]
        assert [row.setting.split(", ")[-1] for row in steps] == [*lengths.DEALS]
        for row in steps:
            assert set(row.rounds) == {*lengths.MEASURED.get(row.setting.split(", ")[-1], first.values), "as it is"} | (
                {"torch", "torch kept"} if row is steps[0] else set()
            )

    run_ranks(2, body)
