"""Tests the public protocol and each tool that stands on it, on models that fsdp2 and torch's own FSDP2 have sharded.

Each check runs for fsdp2 on one, three and 2 x 2 ranks (HSDP), and for torch's on one, and on three or 2 x 2 as it is
dealt; at night on all. What it expects comes from a plain model.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp2
import fsdp2.hf
from fsdp2.shards.find import shards_of
from helpers import NIGHTLY, full, one_mesh, run_checks

# Which checks of torch's FSDP2 do not run on which ranks, by whether they are even or odd in the list of checks.
NOT_DEALT = {("2", 0), ("hsdp", 1)}
LIBRARIES: dict[str, Callable[..., Any]] = {"fsdp2": fsdp2.fully_shard, "torch": torch_fsdp.fully_shard}
TOPOLOGIES = {"2": (2,), "hsdp": (2, 2), **({"1": (1,), "3": (3,), "4": (4,)} if NIGHTLY else {})}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 11), nn.Linear(11, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """Sizes of which three ranks have uneven and empty shards, a tied weight, a frozen one, a buffer, nested wraps."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 4)
        self.blocks = nn.ModuleList([Block(4), Block(4)])
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 13, bias=False)
        self.head.weight = self.embed.weight
        self.blocks[1].norm.bias.requires_grad_(False)
        self.register_buffer("scale", torch.full((1,), 1.5))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.second(self.first(x)) * self.scale.to(x.dtype))


def plain_model() -> Model:
    torch.manual_seed(7)
    return Model()


class Case:
    """A plain model, and the same sharded by one library over one topology, which every check gets anew."""

    def __init__(self, library: str, topology: str, folder: Path) -> None:
        self.library, self.is_torch, self.folder = library, library == "torch", folder / library
        shape = TOPOLOGIES[topology]
        self.mesh = one_mesh(shape, ("replicate", "shard")[-len(shape) :])
        self.num_shards, self.num_replicas = shape[-1], (shape[0] if len(shape) > 1 else 1)
        self.plain, self.model = plain_model(), self.shard(plain_model())
        tokens = torch.arange(12) * 5 % 13
        self.tokens = tokens
        world = dist.get_world_size()
        self.own_tokens = tokens.chunk(world)[dist.get_rank()]

    def shard(self, model: nn.Module, **options: Any) -> Any:
        shard = partial(LIBRARIES[self.library], mesh=self.mesh, **options)
        for block in model.blocks:
            shard(block.up)
            shard(block)
        shard([model.first, model.second])
        return shard(model)

    def loss(self, model: nn.Module, tokens: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(tokens), (tokens + 1) % 13)

    def backward(self) -> None:
        """Gives both models their gradients."""
        self.loss(self.plain, self.tokens).backward()
        self.loss(self.model, self.own_tokens).backward()

    def expected(self, name: str) -> nn.Parameter:
        return self.plain.get_parameter(name)

    def all_names(self) -> set[str]:
        return {name for name, _ in self.plain.named_parameters(remove_duplicate=False)}

    def assert_parameters(self, rtol: float = 1e-5, atol: float = 1e-6) -> None:
        for name, param in self.model.named_parameters():
            torch.testing.assert_close(
                full(param.detach()), self.expected(name).detach(), rtol=rtol, atol=atol, msg=name
            )


# ---- the protocol


def check_the_protocol(case: Case) -> None:
    shards = shards_of(case.model)
    names = [group.name for group in shards.groups]
    assert sorted(names) == ["blocks.0", "blocks.0.up", "blocks.1", "blocks.1.up", "first", "root"], names
    by_name = shards.names()
    assert by_name.keys() == case.all_names()
    assert by_name["head.weight"] == by_name["embed.weight"]
    assert sorted(by_name["head.weight"].names) == ["embed.weight", "head.weight"]
    case.backward()
    for group in shards_of(case.model).groups:
        assert (group.ranks.num_shards, group.ranks.num_replicas) == (case.num_shards, case.num_replicas)
        assert group.ranks.num_ranks == dist.get_world_size()
        assert group.in_use is None
        for param, whole in zip(group.params, group.copy_whole(), strict=True):
            expected = case.expected(param.name)
            assert param.shape == tuple(expected.shape)
            assert torch.equal(whole, expected.detach())
            assert torch.equal(param.local, expected.detach()[param.box])
            assert torch.equal(param.part_of(expected.detach()), param.local)
            if expected.requires_grad:
                torch.testing.assert_close(param.grad, expected.grad[param.box], rtol=1e-5, atol=1e-7)
            else:
                assert param.grad is None
            assert param.group == group
            cuts = param.cuts
            assert [(cut.size, cut.dim, cut.shape) for cut in cuts] == (
                [(case.num_shards, 0, param.shape)] if case.num_shards > 1 else []
            )
            before = param.version
            param.local.mul_(1)
            assert param.version > before
            assert (param.place is None) == case.is_torch
        wide = group.copy_whole([group.params[0]], torch.float64)
        assert [each.dtype for each in wide] == [torch.float64]


def check_what_is_left_unsharded_is_found(case: Case) -> None:
    with torch.no_grad():
        case.model(case.own_tokens)  # torch's FSDP2 leaves the root's parameters registered as plain ones
    assert all(isinstance(param.parameter, DTensor) for param in shards_of(case.model).names().values())
    assert shards_of(case.model).names().keys() == dict(case.plain.named_parameters(remove_duplicate=False)).keys()


def check_nothing_is_sharded(case: Case) -> None:
    shards = shards_of(case.plain)
    assert (list(shards.groups), shards.names()) == ([], {})
    with pytest.raises(TypeError, match=r"expected an nn\.Module"):
        shards_of(3)


# ---- the tools


def check_clip_grad_norm(case: Case) -> None:
    for norm_type, max_norm in ((2.0, 0.1), (float("inf"), 0.01), (1.0, 1e6)):
        case.backward()
        expected = torch.nn.utils.clip_grad_norm_(case.plain.parameters(), max_norm, norm_type)
        for foreach in (None, False):
            if foreach is None:
                got = fsdp2.clip_grad_norm_(case.model.parameters(), max_norm, norm_type)
            else:
                fsdp2.clip_grad_norm_(case.model.parameters(), 1e9, norm_type, foreach=False)
            torch.testing.assert_close(got, expected)
        for name, param in case.model.named_parameters():
            whole = case.expected(name).grad
            assert (param.grad is None) == (whole is None)
            if whole is not None:
                torch.testing.assert_close(full(param.grad), whole, rtol=1e-5, atol=1e-7)
        case.plain.zero_grad()
        case.model.zero_grad()


def check_describe(case: Case) -> None:
    description = fsdp2.describe(case.model)
    assert description.cls == "Model"
    assert not description.unmanaged
    assert description.numel == sum(p.numel() for p in case.plain.parameters())
    rows = {row.name: row for row in description.groups}
    assert rows["blocks.0"].parameters == ("blocks.0.norm.weight", "blocks.0.norm.bias", "blocks.0.down.weight")
    assert (rows["blocks.1"].num_frozen, rows["blocks.1"].cls) == (1, "Block")
    assert rows["first"].modules == ("first", "second")
    own = [param.to_local() for param in case.model.parameters()]
    assert description.resting_nbytes == sum(each.numel() * each.element_size() for each in own)
    for row in description.groups:
        assert (row.num_shards, row.num_replicas) == (case.num_shards, case.num_replicas)
        assert row.dtypes[0] == (torch.float32,)
        unknown = (*row.dtypes[1:], row.gathered_nbytes, row.reduced_nbytes, row.settings)
        assert all(each is None for each in unknown) == case.is_torch
    assert ("?" in str(description)) == case.is_torch


def check_full_params(case: Case) -> None:
    with fsdp2.full_params(case.model, offload_to_cpu=True) as wholes:
        assert wholes.keys() == case.all_names()
        for name, whole in wholes.items():
            assert torch.equal(whole, case.expected(name))
            assert case.model.get_parameter(name) is whole
        with pytest.raises(RuntimeError, match="are copies that full_params has made"):
            case.model(case.own_tokens)
        state = case.model.state_dict() if case.is_torch else None
    with fsdp2.full_params(case.model, dtype=torch.float64, rank0_only=True) as wholes:
        assert {whole.dtype for whole in wholes.values()} == {torch.float64}
        assert {whole.is_meta for whole in wholes.values()} == {dist.get_rank() != 0}
    assert all(isinstance(param, DTensor) for param in case.model.parameters())
    with fsdp2.full_params(case.model, writeback=True) as wholes:
        for whole in {id(each): each for each in wholes.values()}.values():
            whole.mul_(3)
    with torch.no_grad():
        for param in case.plain.parameters():
            param.mul_(3)
    case.assert_parameters()
    case.backward()
    with (
        pytest.raises(RuntimeError, match="modified inside full_params"),
        fsdp2.full_params(case.model, offload_to_cpu=True) as wholes,
    ):
        wholes["first.bias"].add_(1)
    case.assert_parameters()
    if case.num_shards * case.num_replicas > 1:
        with (
            pytest.raises(ValueError, match="ranks have given it different values"),
            fsdp2.full_params(case.model, writeback=True) as wholes,
        ):
            wholes["first.bias"].add_(dist.get_rank())
    if case.is_torch:
        assert state is not None
        with pytest.raises(NotImplementedError, match="Pass an option for copies"):
            fsdp2.full_params(case.model).__enter__()
        with fsdp2.full_params(case.model.blocks[0], writeback=True):  # the advice
            pass
    else:
        with fsdp2.full_params(case.model) as wholes:
            assert torch.equal(wholes["first.bias"], case.expected("first.bias"))


def check_stream_full_params(case: Case) -> None:
    def stream(**options: Any) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for bucket in fsdp2.stream_full_params(case.model, **options):
            found |= {name: tensor.clone() for name, tensor in bucket.tensors.items()}
        return found

    for options in ({}, {"bucket_bytes": 200}, {"dtype": torch.bfloat16}, {"ranks": [0]}):
        found = stream(**options)
        assert found.keys() == (set() if options.get("ranks") and dist.get_rank() else case.all_names())
        for name, tensor in found.items():
            assert torch.equal(tensor, case.expected(name).detach().to(tensor.dtype)), name
    twin, version = plain_model(), fsdp2.StreamVersion()
    stream(since=version)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (case.model, case.plain)]
    case.backward()
    for optimizer in optimizers:
        optimizer.step()
    for bucket in fsdp2.stream_full_params(case.model, since=version):
        assert "blocks.1.norm.bias" not in bucket.names  # frozen: unchanged
        bucket.write_to(dict(twin.named_parameters(remove_duplicate=False)))
    for name, param in twin.named_parameters():
        torch.testing.assert_close(param, case.expected(name), rtol=1e-5, atol=1e-6)
    iterator = fsdp2.stream_full_params(case.model, bucket_bytes=100)
    next(iterator)
    with torch.no_grad():
        next(case.model.parameters()).mul_(2)
    with pytest.raises(RuntimeError, match=r"it was written to or replaced"):
        list(iterator)


def check_check(case: Case) -> None:
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.1)
    case.backward()
    assert fsdp2.check(case.model, optimizer) == []
    with torch.no_grad():
        case.model(case.own_tokens)
    assert fsdp2.check(case.model, optimizer) == [], "also where torch's FSDP2 has left the root unsharded"
    lacking = torch.optim.SGD([case.model.first.weight, nn.Parameter(torch.ones(2))], lr=0.1)
    found = {finding.kind: finding.names for finding in fsdp2.check(case.model, lacking)}
    assert found.keys() == {"optimizer holds strangers", "optimizer lacks"}, found
    assert "blocks.0.up.bias" in found["optimizer lacks"]
    if dist.get_rank() == 0:
        case.model.embed.weight.detach().to_local()[0, 0] = torch.nan
        case.model.first.bias.grad.to_local()[0] = torch.inf
        case.model.scale[0] = 3.0
    case.model.extra = nn.Linear(3, 3)
    found = {finding.kind: finding for finding in fsdp2.check(case.model, optimizer)}
    expected = {"not finite", "gradients not finite"}
    if dist.get_world_size() > 1:
        expected |= {"unmanaged", "buffers differ"}
        if case.num_replicas > 1:
            expected.add("replicas differ")
    found.pop("unmanaged differ", None)
    assert found.keys() == expected, found
    assert found["not finite"].names == ("embed.weight",)
    assert found["not finite"].ranks == (0,)


def check_compare(case: Case) -> None:
    def loss(module: nn.Module, tokens: Tensor) -> Tensor:
        return case.loss(module, tokens)

    case.backward()
    before = {name: full(param.grad) for name, param in case.model.named_parameters() if param.grad is not None}
    comparison = fsdp2.compare(case.plain, case.model, case.tokens, loss)
    assert comparison, comparison
    assert comparison.dtype == torch.float32
    assert {"weights", "outputs", "loss", "gradients"} <= comparison.num_compared.keys()
    for name, grad in before.items():
        assert torch.equal(full(case.model.get_parameter(name).grad), grad), "restored"
    again = fsdp2.compare(
        case.plain,
        case.model,
        case.tokens,
        lambda module, tokens: 2 * loss(module, tokens) if (module is case.model) else loss(module, tokens),
    )
    assert [each.phase for each in again.differences] == ["loss", "gradients"], again
    found = again.differences[1]
    is_one_number = case.model.get_parameter(found.name).numel() <= case.num_shards  # any two are multiples
    assert "scale" in found.hints or is_one_number or case.num_shards * case.num_replicas == 2
    with torch.no_grad():
        case.model.second.weight.mul_(1.01)
    changed = fsdp2.compare(case.plain, case.model, case.tokens, loss)
    assert changed.differences[0].phase == "weights"
    assert (changed.differences[0].name, changed.differences[0].group) == ("second.weight", "first")
    assert {each.phase for each in changed.differences} >= {"weights", "outputs", "loss"}


def check_compare_in_bf16(case: Case) -> None:
    kind = torch_fsdp.MixedPrecisionPolicy if case.is_torch else fsdp2.MixedPrecisionPolicy
    case.model = case.shard(plain_model(), mp_policy=kind(param_dtype=torch.bfloat16))
    comparison = fsdp2.compare(case.plain, case.model, case.tokens, lambda m, tokens: case.loss(m, tokens).float())
    assert comparison.dtype == torch.bfloat16
    assert comparison, comparison


def check_averaged_model(case: Case) -> None:
    options = {"multi_avg_fn": torch.optim.swa_utils.get_ema_multi_avg_fn(0.75)}
    twin = None
    if case.is_torch:
        with pytest.raises(NotImplementedError, match="pass it: "):
            fsdp2.AveragedModel(case.model, **options)
        torch.manual_seed(11)
        twin = case.shard(Model())
    averages = [
        fsdp2.AveragedModel(case.model, module=twin, **options),
        torch.optim.swa_utils.AveragedModel(case.plain, **options),
    ]
    for _ in range(3):
        with torch.no_grad():
            outputs = [average(case.own_tokens) for average in averages]  # torch's leaves the root unsharded
            case.model(case.own_tokens)
        torch.testing.assert_close(*outputs)
        shards_of(case.model)  # reshards
        with torch.no_grad():
            for param in (*case.model.parameters(), *case.plain.parameters()):
                param.mul_(1.25)
        for average, model in zip(averages, (case.model, case.plain), strict=True):
            average.update_parameters(model)
    ours, plain = averages
    shards_of(ours.module)  # reshards
    for name, param in ours.module.named_parameters():
        assert torch.equal(full(param.detach()), plain.module.get_parameter(name).detach()), name


def check_optimizers(case: Case) -> None:
    """Flat steps, and whole matrices beside them."""
    torch.manual_seed(3)
    options = {"exclude": ["embed", "head"]}
    found = {}
    for model in (case.model, case.plain):
        split = fsdp2.split_matrices(model, **options)
        whole = fsdp2.muon(split.matrices, lr=0.1)
        rest = torch.optim.AdamW(split.others, lr=0.1)
        rest = fsdp2.flatten_optimizer(rest) if model is case.model else rest
        split.check(whole, rest)
        found[model] = whole, rest
    for _ in range(3):
        case.backward()
        for optimizer in (*found[case.model], *found[case.plain]):
            optimizer.step()
            optimizer.zero_grad()
    case.assert_parameters(rtol=2e-2, atol=2e-2)  # Newton-Schulz iterations are in bf16
    state = found[case.model][1].state_dict()["state"]
    assert all(isinstance(entry["exp_avg"], DTensor) for entry in state.values())


def check_flat_steps_alone(case: Case) -> None:
    """Each library's own shards step as the plain model does."""
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.05) for model in (case.model, case.plain)]
    fsdp2.flatten_optimizer(optimizers[0])
    for _ in range(4):
        case.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    case.assert_parameters(rtol=1e-4, atol=1e-4)


def check_sync_module_states(case: Case) -> None:
    """Buffers and replicas get the values of the first rank; what is sharded once stays."""
    coordinate = case.mesh.get_coordinate()
    assert coordinate is not None
    with torch.no_grad():
        case.model.scale.fill_(dist.get_rank() + 1.0)
        if case.num_replicas > 1 and case.is_torch:
            case.model.first.weight.add_(coordinate[0])
    fsdp2.sync_module_states(case.model)
    assert case.model.scale.item() == 1.0
    case.assert_parameters()


def check_hf_files(case: Case) -> None:
    folder = case.folder
    fsdp2.hf.save_model(case.model, folder / "saved", max_shard_size=600)
    report = fsdp2.hf.load_model(plain := plain_model(), folder / "saved", names=lambda name: name)
    assert not report.missing
    for name, param in plain.named_parameters():
        assert torch.equal(param, case.expected(name)), name
    with torch.device("meta"):
        empty = Model()
    on_meta = case.shard(empty)
    report = fsdp2.hf.load_model(on_meta, folder / "saved")
    assert report.num_loaded == len(dict(case.plain.named_parameters())) + 1
    assert on_meta.head.weight is on_meta.embed.weight
    case.model = on_meta
    case.assert_parameters()
    torch.testing.assert_close(on_meta.scale, case.plain.scale)
    case.backward()
    for name, param in on_meta.named_parameters():
        if case.expected(name).grad is not None:
            torch.testing.assert_close(full(param.grad), case.expected(name).grad, rtol=1e-5, atol=1e-7)
    with torch.no_grad():
        for param in case.model.parameters():
            param.zero_()
    fsdp2.hf.load_model(case.model, folder / "saved")
    case.assert_parameters()


def check_hf_adapter(case: Case) -> None:
    """Of a model without peft: parameters with `lora_` in their names."""
    torch.manual_seed(9)
    adapted = nn.ModuleDict({"base": nn.Linear(5, 7), "lora_A": nn.Linear(5, 3, bias=False)})
    expected = adapted["lora_A"].weight.detach().clone()
    for module in adapted.values():
        LIBRARIES["torch" if case.is_torch else "fsdp2"](module, mesh=case.mesh)
    fsdp2.hf.save_adapter(adapted, case.folder / "adapter")
    dist.barrier()
    saved = load_file(case.folder / "adapter" / "adapter_model.safetensors")
    assert list(saved) == ["lora_A.weight"]
    assert torch.equal(saved["lora_A.weight"], expected)


def check_plan(case: Case) -> None:
    """A plan, and groups for `fully_shard`, are of a model that is not sharded."""
    for ask in (lambda: fsdp2.plan(case.model, ranks=2), lambda: fsdp2.wrap_groups(case.model, {Block})):
        with pytest.raises(ValueError, match=r"is sharded\. Plan before fully_shard"):
            ask()
    rows = fsdp2.plan(plain_model(), ranks=2, batch=lambda: case.tokens, settings=[{}]).rows
    assert rows[0].shards > 0


CHECKS = {name.removeprefix("check_"): each for name, each in globals().items() if name.startswith("check_")}


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_tools(topology: str, tmp_path: Path) -> None:
    world = torch.Size(TOPOLOGIES[topology]).numel()

    def run(library: str, check: Callable[[Case], None]) -> None:
        check(Case(library, topology, tmp_path))

    drawn = [("fsdp2", name) for name in CHECKS]
    drawn += [("torch", name) for i, name in enumerate(CHECKS) if NIGHTLY or (topology, i % 2) not in NOT_DEALT]
    checks = [(f"{library}: {name}", partial(run, library, CHECKS[name])) for library, name in drawn]
    run_checks(world, checks, timeout=150)


def tensor_parallel(shape: tuple[int, int]) -> None:
    """torch's FSDP2 behind tensor parallelism: along one dim a strided shard, along two dims, and none."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))

    def build() -> nn.Sequential:
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6), nn.Tanh())

    plain, model = build(), build()
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    torch_fsdp.fully_shard(model, mesh=mesh["data"])
    wholes = {name: param.detach() for name, param in plain.named_parameters()}
    params = shards_of(model).names()
    for name, param in params.items():
        assert torch.equal(param.local, wholes[name][param.box]), name
    assert max(len(param.cuts) for param in params.values()) == sum(size > 1 for size in shape)
    for bucket in fsdp2.stream_full_params(model):
        for name, tensor in bucket.tensors.items():
            assert torch.equal(tensor, wholes[name]), name
    with fsdp2.full_params(model, writeback=True) as found:
        for name, tensor in found.items():
            assert torch.equal(tensor, wholes[name]), name
            tensor.mul_(2)
    for name, param in shards_of(model).names().items():
        assert torch.equal(param.local, 2 * wholes[name][param.box]), name
        plain.get_parameter(name).data.mul_(2)
    rows = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    for each in (plain, model):
        each(rows).square().mean().backward()
    got = fsdp2.clip_grad_norm_(model.parameters(), 1e-3)
    torch.testing.assert_close(got, torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e-3))
    for name, param in shards_of(model).names().items():
        torch.testing.assert_close(param.grad, plain.get_parameter(name).grad[param.box])
    assert fsdp2.check(model) == []


def test_tensor_parallelism_of_torch() -> None:
    run_checks(4, [(str(shape), partial(tensor_parallel, shape)) for shape in ((2, 2), (1, 4), (4, 1))])
