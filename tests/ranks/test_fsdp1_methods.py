"""Tests calls of FSDP1's methods that a program has kept: they say what to write, or gather after patch_torch."""

import copy
import io
import re
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as torchs
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.tensor import DTensor, distribute_tensor

import fsdp2
from fsdp2 import full_params, fully_shard
from helpers import assert_same, run_checks, shard_batch
from models import TanhBlock

pytestmark = pytest.mark.filterwarnings("ignore:.*(deprecated|state_dict).*:FutureWarning")
FULL = StateDictType.FULL_STATE_DICT


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block, self.head = nn.Linear(5, 5), TanhBlock(5, 7), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.stem(x)))


def trained(steps: int = 1, **options: Any) -> tuple[Any, Any, Any, Any]:
    """Returns a sharded model, its optimizer, and a plain model with its own, which have trained alike."""
    torch.manual_seed(0)
    plain: Any = Net()
    model = copy.deepcopy(plain)
    fully_shard(model.block, **options)
    fully_shard(model, **options)
    optimizers = [torch.optim.AdamW(each.parameters()) for each in (model, plain)]
    for step in range(steps):
        x = torch.randn(12, 5, generator=torch.Generator().manual_seed(step))
        for each, optimizer, rows in zip((model, plain), optimizers, (rows_of(x), x), strict=True):
            each(rows).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizers[0], plain, optimizers[1]


def rows_of(x: Tensor) -> Tensor:
    return shard_batch(x, dist.get_rank(), dist.get_world_size())


def advised(program: Callable[[], Any], names: dict[str, Any]) -> Any:
    """Returns what the call that the error of `program` advises returns."""
    with pytest.raises(RuntimeError, match=r"got FSDPNet.* On every rank, call ") as caught:
        program()
    call = re.findall(r" call (.*) instead\.", str(caught.value))[0]
    return eval(call, {"torch": torch, "fsdp2": fsdp2, "StateDictOptions": torchs.StateDictOptions, **names})


def state_dicts_are_refused() -> None:
    model, _, plain, _ = trained()
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)

    def in_a_context(kind: Any, *configs: Any) -> None:
        with FSDP1.state_dict_type(model, kind, *configs):
            model.state_dict()

    programs: list[Callable[[], Any]] = [
        lambda: in_a_context(FULL),
        lambda: in_a_context(FULL, config),
        lambda: in_a_context(StateDictType.LOCAL_STATE_DICT),
        lambda: FSDP1.set_state_dict_type(model, FULL),
        lambda: FSDP1.set_state_dict_type(module=model, state_dict_type=FULL),
        lambda: FSDP1.set_state_dict_type(nn.ModuleList([model])[0], FULL),
    ]
    for program in programs:
        state = advised(program, {"model": model})
        if dist.get_rank() == 0:  # which alone gets it on the CPU
            for name, value in plain.state_dict().items():
                assert_same(state[name], value, 1e-5, 1e-6, name)


def sharded_state_dicts_are_refused() -> None:
    model, *_ = trained()
    state = advised(lambda: FSDP1.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT), {"model": model})
    assert all(isinstance(value, DTensor) for value in state.values())
    model.load_state_dict(state)


def optimizer_states_are_refused() -> None:
    model, optimizer, plain, of_plain = trained(steps=2)
    names = {"model": model, "optimizer": optimizer}
    for get in (FSDP1.optim_state_dict, FSDP1.full_optim_state_dict):
        state = advised(lambda get=get: get(model, optimizer), names)
        for name, param in plain.named_parameters() if dist.get_rank() == 0 else ():
            assert_same(state["state"][name]["exp_avg"], of_plain.state[param]["exp_avg"], 1e-5, 1e-6, name)
    shards = copy.deepcopy(advised(lambda: FSDP1.sharded_optim_state_dict(model, optimizer), names))
    whole = torchs.get_optimizer_state_dict(model, optimizer, options=torchs.StateDictOptions(full_state_dict=True))
    sets = (
        (lambda state: FSDP1.optim_state_dict_to_load(model, optimizer, state), whole),
        (lambda state: FSDP1.shard_full_optim_state_dict(state, model, optim=optimizer), whole),
        (lambda state: FSDP1.scatter_full_optim_state_dict(state, model, optim=optimizer), whole),
        (lambda state: FSDP1.flatten_sharded_optim_state_dict(state, model, optimizer), shards),
    )
    for load, state in sets:
        for param in model.parameters():
            optimizer.state[param]["exp_avg"].zero_()
        advised(lambda load=load, state=state: load(state), {**names, "state_dict": copy.deepcopy(state)})
        for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert_same(optimizer.state[param]["exp_avg"], of_plain.state[other]["exp_avg"], 1e-5, 1e-6, name)


def summoning_to_read_is_refused_without_the_patch() -> None:
    model, _, plain, _ = trained()
    for options in ({"writeback": False}, {"recurse": False, "rank0_only": True}, {"offload_to_cpu": True}):

        def summon(options: Any = options) -> None:
            with FSDP1.summon_full_params(model, **options):
                pass

        with advised(summon, {"model": model}):
            for (name, param), other in zip(model.named_parameters(), plain.named_parameters(), strict=True):
                assert_same(param.detach(), other[1], 1e-5, 1e-6, name)


def summoning_to_write_runs_without_the_patch() -> None:
    """Adapters are merged, weights scaled, texts generated: parameters stay sharded, as under torch's FSDP2."""
    model, _, plain, _ = trained()
    x, low, up = torch.randn(6, 5), torch.randn(2, 5), torch.randn(3, 2)

    def merge(options: dict[str, Any]) -> None:
        with FSDP1.summon_full_params(model, **options), torch.no_grad():
            change, head = up @ low, model.head.weight
            head.data += distribute_tensor(change, head.device_mesh, head.placements)
            plain.head.weight.data += change
            for each in (model, plain):
                each.block.up.weight.mul_(0.5)
            assert_same(model(x), plain(x), 1e-5, 1e-6, "a forward inside")
        with FSDP1.summon_full_params(model), full_params(model) as whole:
            for name, other in plain.named_parameters():
                assert_same(whole[name].detach(), other, 1e-5, 1e-6, name)

    for options in ({}, {"writeback": True, "with_grads": False}, {"recurse": False}):
        with pytest.warns(UserWarning, match=r"gathers nothing of FSDPNet.* call fsdp2\.full_params\(model\)"):
            merge(options)
    for each, rows in ((model, rows_of(x)), (plain, x)):
        each(rows).square().mean().backward()
    for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_same(param, other, 1e-5, 1e-6, name)
        assert_same(param.grad, other.grad, 1e-5, 1e-6, name)


def listing_modules_is_refused() -> None:
    model, *_ = trained()
    for ask in (lambda: FSDP1.fsdp_modules(model), lambda: FSDP1.fsdp_modules(model, root_only=True)):
        assert advised(ask, {"model": model}) == [model, model.block]


def parameters_are_summoned() -> None:
    model, _, plain, _ = trained()
    x = torch.randn(6, 5)
    for options in ({}, {"writeback": False}, {"writeback": False, "offload_to_cpu": True}):
        with FSDP1.summon_full_params(model, **options), torch.no_grad():
            for (name, param), other in zip(model.named_parameters(), plain.named_parameters(), strict=True):
                assert_same(param.detach(), other[1], 1e-5, 1e-6, name)
            if "offload_to_cpu" not in options:
                assert_same(model(x), plain(x), 1e-5, 1e-6, "a forward inside")  # as trainers generate
    with FSDP1.summon_full_params(model, recurse=False):
        assert not isinstance(model.stem.weight, DTensor)
        assert isinstance(model.block.state_dict().popitem()[1], DTensor)
    with (
        pytest.raises(RuntimeError, match=r"modified inside full_params\. Write `with fsdp2\.full_params\(module, wr"),
        FSDP1.summon_full_params(model),
        torch.no_grad(),
    ):
        model.head.weight.mul_(2)
    with full_params(model, writeback=True), torch.no_grad():
        model.head.weight.mul_(2)
    # Written out, `writeback=True` says that the block is for writes, of one sharded module or of all.
    with FSDP1.summon_full_params(model, writeback=True), torch.no_grad():
        model.head.weight.mul_(2)
        next(model.block.parameters()).data.add_(1)
    with FSDP1.summon_full_params(model.block, True, True), torch.no_grad():
        next(model.block.parameters()).data = next(model.block.parameters()).data + 1
    with torch.no_grad():
        plain.head.weight.mul_(4)
        next(plain.block.parameters()).add_(2)
    for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_same(param, other, 1e-5, 1e-6, name)
    assert_same(model(x), plain(x), 1e-5, 1e-6, "a forward afterwards")
    for each, rows in ((model, rows_of(x)), (plain, x)):
        each(rows).square().mean().backward()
    with FSDP1.summon_full_params(model, with_grads=True):
        for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert_same(param.grad, other.grad, 1e-5, 1e-6, name)
    with pytest.raises(ValueError, match="gradients are not written back"):
        FSDP1.summon_full_params(model, writeback=True, with_grads=True)


def other_modules_are_left_alone() -> None:
    """Plain ones, FSDP1's own, and torch's checkpoints, which call these methods, too."""
    plain = Net()
    with FSDP1.summon_full_params(plain):
        assert plain.head.weight.shape == (3, 5)
    wrapped = FSDP1(Net(), device_id=torch.device("cpu"), use_orig_params=True)
    with FSDP1.state_dict_type(wrapped, FULL):
        state = wrapped.state_dict()
    assert {name: value.shape for name, value in state.items()} == {n: v.shape for n, v in plain.state_dict().items()}
    for recurse in (True, False):
        with FSDP1.summon_full_params(wrapped, recurse=recurse):
            assert wrapped.head.weight.shape == (3, 5)
        with FSDP1.summon_full_params(plain, recurse=recurse):
            assert plain.head.weight.shape == (3, 5)
    model, optimizer, *_ = trained()
    torchs.get_state_dict(model, optimizer)
    assert FSDP1.fsdp_modules(plain) == []
    with suppress(KeyError):  # torch's own error, of a module that neither has
        FSDP1.set_state_dict_type(plain, FULL)
    torch.save(plain.state_dict(), io.BytesIO())


def modules_of_both_are_summoned() -> None:
    """Some parameters are FSDP1's, some of fully_shard: inside, outside, and under a module that is neither."""
    torch.manual_seed(0)
    plain, expected = Net(), {}
    for name, param in plain.named_parameters():
        expected[name] = param.detach().clone()
    cpu = torch.device("cpu")
    outside, inside = copy.deepcopy(plain), copy.deepcopy(plain)
    fully_shard(outside.block)
    states = [*outside.block.parameters()]
    around = FSDP1(outside, device_id=cpu, use_orig_params=True, ignored_states=states)
    inside.block = FSDP1(inside.block, device_id=cpu, use_orig_params=True)
    fully_shard(inside.head)
    for model in (around, inside):
        for writeback in (True, False):
            with FSDP1.summon_full_params(model, writeback=writeback):
                found = {name.replace("_fsdp_wrapped_module.", ""): p for name, p in model.named_parameters()}
                assert found.keys() == expected.keys()
                for name, value in expected.items():
                    assert_same(found[name].detach(), value, 0, 0, name)
        x = torch.randn(2, 5)
        assert_same(model(x), plain(x), 1e-5, 1e-6, "a forward afterwards")


def patched(body: Callable[[], None]) -> Callable[[], None]:
    """Returns `body`, run while torch is patched: then torch's method is in its place again."""

    @wraps(body)
    def run() -> None:
        before = vars(FSDP1)["summon_full_params"]
        with fsdp2.patch_torch(), fsdp2.patch_torch():
            body()
        assert vars(FSDP1)["summon_full_params"] is before

    return run


CHECKS = (
    patched(modules_of_both_are_summoned),
    state_dicts_are_refused,
    sharded_state_dicts_are_refused,
    optimizer_states_are_refused,
    summoning_to_read_is_refused_without_the_patch,
    summoning_to_write_runs_without_the_patch,
    listing_modules_is_refused,
    patched(parameters_are_summoned),
    other_modules_are_left_alone,
)


def test_methods_of_fsdp1() -> None:
    run_checks(2, [(each.__name__, each) for each in CHECKS])


def replicas_of_shards() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    model, *_ = trained(mesh=mesh)
    with pytest.raises(RuntimeError, match="get_model_state_dict"), FSDP1.state_dict_type(model, FULL):
        pass


def test_methods_of_fsdp1_on_replicas() -> None:
    run_checks(4, [("replicas", replicas_of_shards)])
