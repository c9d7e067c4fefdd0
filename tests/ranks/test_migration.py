"""Tests the tables of the guides for programs that come from torch's FSDP2, FSDP1, DDP and DeepSpeed.

Each row says "in place of X write Y". Here Y is written. It trains on every rank what a plain model trains on the whole
batch, or does what X did. A row without a program, and a program without a row, fail: its first cell identifies a row.
tests/BEHAVIOURS.md names the tests of the differences from torch's FSDP2.
"""

import copy
import inspect
import io
import shutil
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torchs
from torch import Tensor, nn
from torch.distributed.algorithms._comm_hooks.default_hooks import DefaultState, allreduce_hook, reduce_scatter_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy, size_based_auto_wrap_policy
from torch.distributed.tensor import DTensor, Replicate, Shard

import fsdp2
from documents import ROOT, table_rows, tables_of_guides
from fsdp2 import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    full_params,
    fully_shard,
    replicate,
    sync_module_states,
)
from fsdp2.codecs import Cast, Float8, Int8
from helpers import assert_same, run_checks, shard_batch
from models import TanhBlock, mean_loss

TABLES = {name: f"Coming from {name}" for name in ("torch's FSDP2", "FSDP1", "DDP", "DeepSpeed")}
ROWS = tables_of_guides()
DIFFERENCES = {cells[0] for cells in table_rows(ROOT / "tests" / "BEHAVIOURS.md")["Coming from torch's FSDP2"]}
Program = Callable[[], None]
PROGRAMS: dict[tuple[str, str], tuple[int, Program]] = {}
# Which torch 2.13 has renamed.
all_gather_one = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_one = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
OPTIONS = StateDictOptions(full_state_dict=True, cpu_offload=True)
ROWS_OF_A_BATCH, RATE = 12, 0.1


def row(table: str, cell: str, ranks: int = 2) -> Callable[[Program], Program]:
    """The program of the row of `table` whose first cell is `cell`."""

    def add(program: Program) -> Program:
        PROGRAMS[table, cell] = (ranks, program)
        return program

    return add


# ---- a model, its plain training, and its training in shards -------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 8)
        self.register_buffer("scale", torch.full((8,), 1.5))
        self.blocks = nn.ModuleList(TanhBlock(8, 6) for _ in range(3))
        self.branch = nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)
        self.use_branch = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x + self.branch(x) if self.use_branch else x)


def build(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def shard(model: Net, **options: Any) -> Any:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def batch(step: int) -> Tensor:
    return torch.randn(ROWS_OF_A_BATCH, 5, generator=torch.Generator().manual_seed(step))


def own(step: int) -> Tensor:
    return shard_batch(batch(step), dist.get_rank(), dist.get_world_size())


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE, momentum=0.5)


def plainly_trained(steps: int = 2, accumulated: int = 1, clip: float | None = None, model: Any = None) -> Any:
    model = model if model is not None else build()
    optimizer = sgd(model)
    for step in range(steps):
        for i in range(accumulated):
            (mean_loss(model(batch(accumulated * step + i))) / accumulated).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return model


def train(model: Any, steps: int = 2, accumulated: int = 1, quiet: str | None = None, clip: Any = None) -> None:
    """`quiet`: the method that is False for all micro-batches but the last, or the context around these (no_sync).
    `clip`: called before each step.
    """
    optimizer = sgd(model)
    for step in range(steps):
        for i in range(accumulated):
            is_last, is_context = i == accumulated - 1, quiet == "no_sync"
            if quiet is not None and not is_context:
                getattr(model, quiet)(is_last)
            with model.no_sync() if is_context and not is_last else nullcontext():
                (mean_loss(model(own(accumulated * step + i))) / accumulated).backward()
        if clip is not None:
            clip(model.parameters())
        optimizer.step()
        optimizer.zero_grad()


def assert_like(model: nn.Module, expected: nn.Module, tolerance: float = 1e-5) -> None:
    others = dict(expected.named_parameters())
    assert [name for name, _ in model.named_parameters()] == list(others)
    for name, param in model.named_parameters():
        assert_same(param, others[name], tolerance, tolerance, name)


def trains(model: Any, tolerance: float = 1e-5, **options: Any) -> None:
    train(model, **options)
    clip = options.pop("clip", None)
    options.pop("quiet", None)
    assert_like(model, plainly_trained(**options, clip=0.05 if clip else None), tolerance)


def of_first_rank() -> bool:
    return dist.get_rank() == 0


class CountedGather:
    """An all-gather that notes each call."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        self.log.append(self.name)
        return all_gather_one(output_tensor, input_tensor.clone(), group=group, async_op=async_op)


def gathers_of_first_block(**options: Any) -> int:
    """In one step, of which the first has recorded the order."""
    model, log = shard(build(), **options), []
    model.blocks[0].set_custom_all_gather(CountedGather(log, "gather"))
    train(model, steps=1)
    log.clear()
    train(model, steps=1)
    return len(log)


def order_in_a_step(choose: Callable[[Any], None]) -> list[str]:
    """When block 1 computes, in forward and backward, and when the gathers of its neighbours begin."""
    model, log = shard(build(), reshard_after_forward=True), []

    def note(module: nn.Module, args: Any, output: Tensor) -> None:
        log.append("computes 1")
        output.register_hook(lambda _: log.append("computes 1 backward"))

    model.blocks[1].up.register_forward_hook(note)
    for i in (0, 2):
        model.blocks[i].set_custom_all_gather(CountedGather(log, f"gathers {i}"))
    choose(model)
    for _ in range(2):
        log.clear()
        mean_loss(model(own(0))).backward()
    return log


# ---- FSDP1 ---------------------------------------------------------------------------------------------------------


@row("FSDP1", "`auto_wrap_policy=policy`")
def by_policies_of_torch() -> None:
    for policy in (ModuleWrapPolicy({TanhBlock}), CustomPolicy(lambda module: isinstance(module, TanhBlock))):
        model = build()
        for group in fsdp2.wrap_groups(model, policy):
            fully_shard(group.module, **group.options)
        fully_shard(model)
        assert sum(isinstance(m, FSDPModule) for m in model.modules()) == 4
        trains(model)
    model = build()
    with pytest.warns(UserWarning, match="makes one group of all"):
        assert fsdp2.wrap_groups(model, partial(size_based_auto_wrap_policy, min_num_params=100_000_000)) == []
    trains(fully_shard(model))


@row("DeepSpeed", "stage 3")
@row("FSDP1", "`FULL_SHARD`; `SHARD_GRAD_OP`")
def resharding() -> None:
    trains(shard(build()))
    trains(shard(build(), reshard_after_forward=False))
    assert (gathers_of_first_block(), gathers_of_first_block(reshard_after_forward=False)) == (2, 1)


@row("DeepSpeed", "`mics_shard_size`", ranks=4)
@row("FSDP1", "`HYBRID_SHARD`; `_HYBRID_SHARD_ZERO2`", ranks=4)
def hybrid() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for options in ({}, {"reshard_after_forward": False}):
        model = shard(build(), mesh=mesh, **options)
        assert model.stem.weight.placements == (Replicate(), Shard(0))
        trains(model)


@row("DDP", "`DistributedDataParallel(model)`")
@row("FSDP1", "`NO_SHARD`")
def replicas() -> None:
    model: Any = replicate(build())
    assert model.stem.weight.to_local().shape == model.stem.weight.shape
    trains(model)
    trains(shard(build()))


@row("DeepSpeed", "`bf16.enabled`")
@row("FSDP1", "`MixedPrecision(param_dtype, reduce_dtype)`")
def mixed_precision() -> None:
    model = shard(build(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    model.scale.data = model.scale.bfloat16()
    assert model(own(0)).dtype == torch.bfloat16
    mean_loss(model(own(0))).backward()
    assert {(p.dtype, p.grad.dtype) for p in model.parameters() if p.grad is not None} == {(torch.float32,) * 2}
    model.zero_grad()
    trains(model, tolerance=1e-2)


@row("FSDP1", "`MixedPrecision(buffer_dtype)`")
def buffers() -> None:
    """Whole numbers, flags and complex numbers stay what they are, and so does what is saved."""
    others = {
        "index": torch.tensor([299, 257]),
        "short": torch.tensor([301], dtype=torch.int16),
        "mask": torch.tensor([True, False]),
        "phases": torch.tensor([1 + 0.001j]),
    }
    model, expected = build(), build()
    for name, value in others.items():
        model.stem.register_buffer(name, value.clone())
    model.scale.fill_(1.1)
    expected.scale.fill_(1.1)
    expected.scale.data = expected.scale.bfloat16().float()
    model = shard(model, mp_policy=MixedPrecisionPolicy(buffer_dtype=torch.bfloat16))
    seen: list[Any] = []
    model.blocks[0].register_forward_hook(lambda *_: seen.append((model.scale.dtype, model.stem.index.dtype)))
    train(model)
    assert {*seen} == {(torch.bfloat16, torch.int64)}
    assert_like(model, plainly_trained(model=expected))
    for name, value in others.items():
        assert torch.equal(getattr(model.stem, name), value), name
    assert torch.equal(model.state_dict()["scale"], torch.full((8,), 1.1))


@row("FSDP1", "`MixedPrecision(keep_low_precision_grads=True)`")
def dtype_of_gradients() -> None:
    model = shard(build(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16))
    model.scale.data = model.scale.bfloat16()
    mean_loss(model(own(0))).backward()
    cast_back = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}
    assert {each.dtype for each in cast_back.values()} == {torch.float32}
    model = shard(build(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, grad_dtype=torch.bfloat16))
    model.scale.data = model.scale.bfloat16()
    mean_loss(model(own(0))).backward()
    kept = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}
    assert {each.dtype for each in kept.values()} == {torch.bfloat16}
    assert kept.keys() == cast_back.keys()
    assert all(torch.equal(kept[name].float(), each) for name, each in cast_back.items())
    for name in ("keep_low_precision_grads", "cast_root_forward_inputs", "_module_classes_to_ignore"):
        with pytest.raises(TypeError, match=f"{name} is an argument of FSDP1.*guides/from-fsdp1.md"):
            MixedPrecisionPolicy(**{name: True})  # type: ignore[arg-type]
    fields = {*inspect.signature(torchs.MixedPrecision).parameters} - {
        *inspect.signature(MixedPrecisionPolicy).parameters
    }
    assert fields == {"keep_low_precision_grads", "cast_root_forward_inputs", "_module_classes_to_ignore"}
    for name in {*inspect.signature(torchs.FullyShardedDataParallel).parameters} - {"module"}:
        with pytest.raises(TypeError, match=f"fully_shard: {name} is an argument of FullySharded"):
            fully_shard(build(), **{name: None})


@row("FSDP1", "`MixedPrecision(cast_forward_inputs, cast_root_forward_inputs)`")
def inputs_of_the_root_alone() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 4))
    seen: list[torch.dtype] = []
    for layer in model:
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=False))
        layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    assert model(own(0)).dtype == torch.bfloat16
    assert seen == [torch.bfloat16] * 2
    with pytest.raises(RuntimeError, match="must have the same dtype"):
        model[1](torch.randn(2, 4))


@row("FSDP1", "`MixedPrecision(_module_classes_to_ignore)`")
def classes_in_full_precision() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)), nn.Linear(4, 4))
    whole = {"mp_policy": MixedPrecisionPolicy(torch.float32, output_dtype=torch.bfloat16)}
    for group in fsdp2.wrap_groups(model, {nn.BatchNorm1d: whole}):
        fully_shard(group.module, **group.options)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    seen: list[Any] = []
    for module in (model[0][1], model[1]):
        module.register_forward_hook(lambda m, args, output: seen.append((args[0].dtype, m.weight.dtype)))
    mean_loss(model(own(0))).backward()
    assert seen == [(torch.float32,) * 2, (torch.bfloat16,) * 2]
    assert model[0][1].weight.grad.dtype == torch.float32


@row("FSDP1", "`CPUOffload(offload_params=True)`")
def offload() -> None:
    model = shard(build(), offload_policy=CPUOffloadPolicy())
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    trains(model)


@row("DDP", "`ignored_modules`")
@row("FSDP1", "`ignored_states`, `ignored_modules`")
def ignored() -> None:
    for chosen in (lambda m: {*m.parameters()}, lambda m: [m, m.weight], lambda m: m):
        model = build()
        model.branch.requires_grad_(False)
        shard(model, ignored_params=chosen(model.branch))
        assert type(model.branch.weight) is nn.Parameter
        trains(model)
    used: Any = build()
    used.branch.requires_grad_(False)
    parameters = used.branch.parameters()
    fully_shard(used, ignored_params=parameters)
    assert type(used.branch.weight) is nn.Parameter
    with pytest.raises(ValueError, match="another call has used it up"):
        fully_shard(nn.Linear(2, 2), ignored_params=parameters)
    with_buffer = build()
    with_buffer.branch.requires_grad_(False)
    with_buffer.branch.register_buffer("large", torch.ones(2, device="meta"))
    large = with_buffer.branch.large
    shard(with_buffer, ignored_params=[with_buffer.branch, with_buffer.branch.weight])
    assert with_buffer.branch.large is large


@row("FSDP1", "`process_group`, `device_mesh`")
@row("DDP", "`process_group`, `device_mesh`")
def ranks_of_a_process_group() -> None:
    group = dist.new_group([*range(dist.get_world_size())])
    mesh = DeviceMesh.from_group(group, "cpu")
    trains(shard(build(), mesh=mesh))
    trains(replicate(build(), mesh=mesh))


@row("DeepSpeed", "`reduce_bucket_size`, `overlap_comm`, `contiguous_gradients`")
@row("FSDP1", "`use_orig_params=True`, `limit_all_gathers=True`, `forward_prefetch=True`, `BACKWARD_PRE`")
def always_so() -> None:
    """Parameters keep names and shapes; the next group is gathered before a block computes, in both directions."""
    model = shard(build())
    shapes = [(name, p.shape) for name, p in model.named_parameters()]
    assert shapes == [(name, p.shape) for name, p in build().named_parameters()]
    trains(model)
    order = order_in_a_step(lambda model: None)
    assert order.index("gathers 2") < order.index("computes 1")
    assert order[::-1].index("gathers 0") > order[::-1].index("computes 1 backward")


@row("FSDP1", "`BACKWARD_POST`")
def ahead_when_a_group_is_done() -> None:
    """The next group is gathered when block 1 has its gradients, and before these are reduced."""

    def events(when: str) -> list[str]:
        model, log = shard(build(), reshard_after_forward=True), []

        def note(module: nn.Module, args: Any, output: Tensor) -> None:
            output.register_hook(lambda _: log.append("computes"))

        model.blocks[1].up.register_forward_hook(note)
        model.blocks[0].set_custom_all_gather(CountedGather(log, "gathers"))
        model.blocks[1].set_custom_reduce_scatter(CountedReduceScatter(log, "reduces"))
        model.set_backward_prefetch(when)
        trains(model)
        log.clear()
        output = model(own(0))
        assert log.pop() == "gathers"
        mean_loss(output).backward()
        return log

    assert events("pre") == ["gathers", "computes", "reduces"]
    assert events("post") == ["computes", "gathers", "reduces"]


@row("FSDP1", "`backward_prefetch=None`; `forward_prefetch=False`")
def nothing_ahead() -> None:
    """By each method for its direction, and by the budget for both."""

    def ahead(choose: Callable[[Any], None]) -> tuple[bool, bool]:
        order = order_in_a_step(choose)
        forward = order.index("gathers 2") < order.index("computes 1")
        return forward, order[::-1].index("gathers 0") > order[::-1].index("computes 1 backward")

    def each(method: str) -> Callable[[Any], None]:
        return lambda model: [getattr(m, method)([]) for m in model.modules() if isinstance(m, FSDPModule)]  # type: ignore[return-value]

    assert ahead(lambda model: None) == (True, True)
    assert ahead(each("set_modules_to_forward_prefetch")) == (False, True)
    assert ahead(each("set_modules_to_backward_prefetch")) == (True, False)
    assert ahead(lambda model: model.set_prefetch_budget(0)) == (False, False)


@row("DDP", "ranks that start from the first one's weights")
@row("FSDP1", "`sync_module_states=True`")
def the_first_ranks_weights() -> None:
    model = build(seed=dist.get_rank())
    sync_module_states(model)
    trains(shard(model))
    later = shard(build(seed=dist.get_rank()))
    state = build().state_dict() if of_first_rank() else {}
    set_model_state_dict(later, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    trains(later)


@row("DeepSpeed", "`zero.Init()`")
@row("FSDP1", "`param_init_fn`")
def built_on_meta() -> None:
    with torch.device("meta"):
        model = Net()
    shard(model)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    model.scale.fill_(1.5)
    trains(model)


@row("FSDP1", "`device_id`")
def device_of_the_mesh() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = shard(build(), mesh=mesh)
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {mesh.device_type}


@row("DeepSpeed", "`gradient_accumulation_steps`")
@row("FSDP1", "`no_sync()`")
def accumulation() -> None:
    trains(shard(build()), accumulated=3, quiet="set_requires_gradient_sync")
    trains(shard(build()), accumulated=3, quiet="no_sync")


@row("DeepSpeed", "`gradient_clipping`")
@row("FSDP1", "`model.clip_grad_norm_(...)`")
def clipping() -> None:
    for clip in (nn.utils.clip_grad_norm_, fsdp2.clip_grad_norm_):
        trains(shard(build()), clip=partial(clip, max_norm=0.05))


@row("FSDP1", "`FullyShardedDataParallel.summon_full_params(m)` in code that you do not edit")
def summoned_by_fsdp1() -> None:
    model, plain = shard(build()), build()

    def write() -> None:
        with torchs.FullyShardedDataParallel.summon_full_params(model), torch.no_grad():
            for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert_same(param, expected, 0, 0, name)
            model.head.weight.zero_()

    with pytest.raises(RuntimeError, match=r"call fsdp2\.full_params\(model\) instead"):
        write()
    with fsdp2.patch_torch(), pytest.raises(RuntimeError, match="modified inside full_params"):
        write()
    trains(model)
    written, expected = shard(build()), build()
    with fsdp2.patch_torch():
        summoned = torchs.FullyShardedDataParallel.summon_full_params(written, writeback=True)
    with summoned, torch.no_grad():
        written.head.weight.zero_()
        expected.head.weight.zero_()
    assert_like(written, expected, 0)


@row("FSDP1", "`summon_full_params(m, recurse, writeback, rank0_only, offload_to_cpu)`")
def summoned() -> None:
    model, expected = shard(build()), build()
    with torch.no_grad():
        with full_params(model, writeback=True):
            model.stem.weight[1] = 7.0
        expected.stem.weight[1] = 7.0
    assert_like(model, expected, 0)
    with full_params(model, rank0_only=True, offload_to_cpu=True) as whole:
        for name, value in whole.items():
            assert value.is_meta != of_first_rank()
            if of_first_rank():
                assert_same(value, expected.get_parameter(name), 0, 0, name)
    with torch.no_grad(), pytest.raises(RuntimeError, match="writeback=True"), full_params(model, offload_to_cpu=True):
        model.stem.weight[1] = 8.0


@row("FSDP1", "`summon_full_params(with_grads=True)`")
def whole_gradients() -> None:
    model, expected = shard(build()), build()
    mean_loss(model(own(0))).backward()
    mean_loss(expected(batch(0))).backward()
    grad: Any = model.stem.weight.grad
    assert_same(grad.full_tensor(), expected.stem.weight.grad, 1e-5, 1e-6, "stem.weight")
    with full_params(model, with_grads=True) as whole:
        for (name, value), param in zip(whole.items(), expected.parameters(), strict=True):
            assert_same(value.grad, param.grad, 1e-5, 1e-6, name)


@row("FSDP1", "`SHARDED_STATE_DICT`; `LOCAL_STATE_DICT`")
def state_dicts_of_shards() -> None:
    model = shard(build())
    state = model.state_dict()
    assert all(isinstance(state[name], DTensor) for name, _ in model.named_parameters())
    rows = build().stem.weight.chunk(dist.get_world_size())[dist.get_rank()]
    assert_same(state["stem.weight"].to_local(), rows, 0, 0, "stem.weight")


@row("FSDP1", "`if rank == 0: torch.save(model.state_dict(), file)`")
def saved_by_the_first_rank() -> None:
    """tests/ranks/test_saved_shards.py has what the line does; here is what to write."""
    state = get_model_state_dict(shard(build()), options=OPTIONS)
    file = io.BytesIO()
    if of_first_rank():
        torch.save(state, file)
        file.seek(0)
        loaded = build(seed=1)
        loaded.load_state_dict(torch.load(file))
        assert_like(loaded, build(), 0)


@row("FSDP1", "`fsdp_modules(model)`; `check_is_root()`")
def sharded_modules() -> None:
    model = shard(build())
    assert [m for m in model.modules() if isinstance(m, FSDPModule)] == [model, *model.blocks]
    groups = fsdp2.shards_of(model).groups
    assert [(each.modules[0], each.is_root) for each in groups] == [
        (model, True),
        *((block, False) for block in model.blocks),
    ]


@row("FSDP1", "`model.apply(init)`")
def initialised_afterwards() -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            torch.nn.init.orthogonal_(module.weight)  # needs the whole matrix

    model, expected = shard(build()), build()
    torch.manual_seed(3)
    with full_params(model, writeback=True):
        model.apply(init)
    torch.manual_seed(3)
    expected.apply(init)
    assert_like(model, expected, 0)


@row("DeepSpeed", "`stage3_gather_16bit_weights_on_model_save`")
@row("FSDP1", "`state_dict_type(FULL_STATE_DICT)`")
def full_state_dict() -> None:
    state = get_model_state_dict(shard(build()), options=OPTIONS)
    assert bool(state) == of_first_rank()
    if of_first_rank():
        loaded = build(seed=1)
        loaded.load_state_dict(state)
        assert_like(loaded, build(), 0)


@row("FSDP1", "`optim_state_dict`, `optim_state_dict_to_load`")
def optimizer_state() -> None:
    """Momentum goes on in another model, from a whole state that one rank has."""
    model, again, expected = shard(build()), shard(build(seed=1)), build()
    for each in (model, again, expected):
        each.use_branch = True  # all parameters have a state
    optimizer = sgd(model)
    mean_loss(model(own(0))).backward()
    optimizer.step()
    weights = get_model_state_dict(model, options=OPTIONS)
    moments = get_optimizer_state_dict(model, optimizer, options=OPTIONS)
    optimizer = sgd(again)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(again, weights, options=options)
    set_optimizer_state_dict(again, optimizer, moments, options=options)
    mean_loss(again(own(1))).backward()
    optimizer.step()
    assert_like(again, plainly_trained(steps=2, model=expected))


@row(
    "FSDP1",
    "`full_optim_state_dict`, `scatter_full_optim_state_dict`, `shard_full_optim_state_dict`, "
    "`sharded_optim_state_dict`, `flatten_sharded_optim_state_dict`",
)
@row("FSDP1", "`rekey_optim_state_dict`")
def optimizer_state_of_a_plain_model() -> None:
    """What an optimizer of a plain model has numbered, under names; and back."""
    plain, model, again = build(), shard(build(seed=1)), build(seed=2)
    for each in (plain, model, again):
        each.use_branch = True
    of_plain, optimizer, of_again = sgd(plain), sgd(model), sgd(again)
    mean_loss(plain(batch(0))).backward()
    of_plain.step()
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, plain.state_dict(), options=options)
    set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(plain, of_plain), options=options)
    mean_loss(model(own(1))).backward()
    optimizer.step()
    set_model_state_dict(again, get_model_state_dict(model, options=options))
    set_optimizer_state_dict(again, of_again, get_optimizer_state_dict(model, optimizer, options=options))
    optimizer.zero_grad()
    of_again.zero_grad()
    mean_loss(again(batch(2))).backward()
    of_again.step()
    expected = build()
    expected.use_branch = True
    assert_like(again, plainly_trained(steps=3, model=expected))


@row("FSDP1", "`ShardedGradScaler`")
def scaler() -> None:
    model = shard(build())
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu")
    for step in range(2):
        scaler.scale(mean_loss(model(own(step)))).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert_like(model, plainly_trained())


class CountedReduceScatter(CountedGather):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:  # type: ignore[override]
        self.log.append(self.name)
        return reduce_scatter_one(output_tensor, input_tensor, op, group=group, async_op=async_op)


@row("FSDP1", "`register_comm_hook(state, hook)`")
def hooks_of_reductions() -> None:
    calls: list[int] = []

    def counted(state: Any, gradient: Tensor, sharded: Tensor) -> None:
        calls.append(gradient.numel())
        reduce_scatter_hook(state, gradient, sharded)

    for hook in (reduce_scatter_hook, counted):
        model = shard(build())
        model.register_comm_hook(DefaultState(dist.group.WORLD), hook)
        trains(model)
    assert len(calls) >= 2 * 4, "each group in each step"
    model = replicate(build())
    model.register_comm_hook(DefaultState(dist.group.WORLD), allreduce_hook)
    trains(model)


@row("FSDP1", "a hook that looks at gradients, or changes them")
def hooks_behind_reductions() -> None:
    model = shard(build())
    model.set_all_reduce_hook(lambda reduced: reduced.mul_(0.5), recurse=True)
    mean_loss(model(own(0))).backward()
    expected = build()
    (mean_loss(expected(batch(0))) / 2).backward()
    for (name, param), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert_same(param.grad, other.grad, 1e-5, 1e-6, name)  # of each group, not of the root's alone
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))
    model = shard(build(), mesh=mesh)
    model.register_comm_hook(mesh.get_group("replicate"), fp16_compress_hook)
    trains(model, tolerance=1e-3)


# ---- DDP -----------------------------------------------------------------------------------------------------------


@row("DDP", "`model.module`, names that begin with `module.`")
def names() -> None:
    model = replicate(build())
    assert list(model.state_dict()) == list(build().state_dict())


@row("DDP", "`no_sync()`")
def accumulation_of_replicas() -> None:
    trains(replicate(build()), accumulated=3, quiet="no_sync")


@row("DDP", "`find_unused_parameters=True`")
def unused_parameters() -> None:
    """What no rank uses has no gradient; what one rank uses has it on all."""
    for shard_ in (replicate, shard):
        model: Any = shard_(build())
        trains(model)
        mean_loss(model(own(0))).backward()
        assert model.branch.weight.grad is None
        model = shard_(build())
        model.set_reduce_scatter_unused_params(True)
        model.use_branch = of_first_rank()
        mean_loss(model(own(0))).backward()
        expected = build()
        expected.use_branch = True
        (mean_loss(expected(batch(0)[:6])) / 2).backward()
        assert_same(model.branch.weight.grad, expected.branch.weight.grad, 1e-5, 1e-6, "branch.weight")


@row("DDP", "`broadcast_buffers=True`")
def running_statistics() -> None:
    """Averaged over ranks behind each forward; another buffer that differs is an error until it is synchronised."""
    torch.manual_seed(0)
    model: Any = replicate(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)))
    model.register_buffer("own", torch.tensor(float(dist.get_rank())))
    with pytest.raises(RuntimeError, match=r"own holds other values .* Call fsdp2\.sync_module_states\(model\)"):
        model(own(0))
    sync_module_states(model)
    assert model.own == 0
    model(own(0))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    expected = 0.1 * torch.stack([plain[0](rows).mean(0) for rows in batch(0).chunk(2)]).mean(0)
    assert_same(model[1].running_mean, expected, 1e-5, 1e-6, "running_mean")


@row("DDP", "`broadcast_buffers=True`, bit for bit")
def buffers_of_the_first_rank() -> None:
    """Beside DDP itself: each forward begins with the first rank's buffers, also at the steps at which checks run."""
    torch.manual_seed(0)
    plain: Any = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    ddp = nn.parallel.DistributedDataParallel(copy.deepcopy(plain))
    model: Any = replicate(plain)
    model.set_running_stats_averaging(False)

    def broadcast(module: nn.Module, args: Any) -> None:
        for buffer in module.buffers():
            dist.broadcast(buffer, 0)

    model.register_forward_pre_hook(broadcast)
    for step in range(5):
        for each in (model, ddp):
            mean_loss(each(own(step))).backward()
        for buffer, other in zip(model.buffers(), ddp.module.buffers(), strict=True):
            assert torch.equal(buffer, other)


@row("DDP", "`register_comm_hook(state, hook)`, `powerSGD_hook`")
def gradients_in_fp16() -> None:
    trains(shard(build(), mp_policy=MixedPrecisionPolicy(wire_dtype=torch.float16)), tolerance=1e-3)
    trains(replicate(build(), mp_policy=MixedPrecisionPolicy(replica_codec=Cast(torch.float16))), tolerance=1e-3)
    for state, hook in ((None, fp16_compress_hook), (PowerSGDState(None, start_powerSGD_iter=10), powerSGD_hook)):
        model = replicate(build())
        model.register_comm_hook(state, hook)
        trains(model, tolerance=1e-3)


@row("DDP", "`device_ids`, `output_device`, `dim`")
@row("DDP", "`init_sync=False`, `forward_sync_buffers`")
def arguments_of_ddp() -> None:
    """They are errors that say what to write."""
    options = {
        "device_ids": [0],
        "output_device": 0,
        "broadcast_buffers": True,
        "bucket_cap_mb": 25,
        "init_sync": False,
    }
    options |= {"find_unused_parameters": True, "gradient_as_bucket_view": True, "static_graph": True}
    for name, value in options.items():
        with pytest.raises(TypeError, match=rf"{name} is an argument of DistributedD.*guides/from-ddp.md"):
            replicate(build(), **{name: value})  # type: ignore[call-arg]
    parameters = {*inspect.signature(nn.parallel.DistributedDataParallel).parameters}
    cells = " ".join(cells[0] for cells in ROWS["Coming from DDP"])
    for name in parameters - {"module"}:
        assert f"`{name}" in cells, name
        with pytest.raises(TypeError, match=f"{name} is an argument of DistributedDataParallel"):
            replicate(build(), **{name: None})
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        replicate(build(), typo=1)  # type: ignore[call-arg]
    model = replicate(build())
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    trains(model)


@row("DDP", "`bucket_cap_mb`, `bucket_cap_mb_list`")
def bytes_of_buckets() -> None:
    """Their number in a step, by the collectives that a hook sees."""
    counts: list[int] = []
    for nbytes in (None, 1, 300, 10**9):
        model: Any = replicate(build())
        seen: list[int] = []
        model.set_all_reduce_hook(lambda reduced, seen=seen: seen.append(reduced.numel()))
        model.set_gradient_buckets(nbytes)
        trains(model, steps=1)
        counts.append(len(seen))
        assert max(seen) * 4 <= max(300, 8 * 8 * 4) or nbytes in (None, 10**9)
    parameters = sum("branch" not in name for name, _ in build().named_parameters())
    assert counts[0] == counts[3] == 1  # all of them are little
    assert counts[1] == parameters
    assert 1 < counts[2] < parameters


@row("DDP", "`mixed_precision`")
def mixed_precision_of_replicas() -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, buffer_dtype=torch.bfloat16)
    model = replicate(build(), mp_policy=policy)
    assert model(own(0)).dtype == torch.bfloat16
    trains(model, tolerance=1e-2)


@row(
    "DDP",
    "`gradient_as_bucket_view`, `static_graph`, `batched_grad_copy`, "
    "`check_reduction`, `delay_all_reduce_named_params`, `param_to_hook_all_reduce`, `skip_all_reduce_unused_params`",
)
def nothing_to_choose() -> None:
    trains(replicate(build()))


@row("DDP", "`join()`, `Join([model])`, for ranks with different numbers of batches")
def fewer_batches() -> None:
    """The mean is one over all ranks, as in DDP's `join`: a rank without a batch counts as a gradient of zero."""
    for model, joins in ((replicate(build()), fsdp2.join), (shard(build()), lambda each: Join([each]))):
        optimizer, ranks, rank = sgd(model), dist.get_world_size(), dist.get_rank()
        with joins(model):
            for step in range(3 if rank == 0 else 1):
                mean_loss(model(own(step))).backward()
                optimizer.step()
                optimizer.zero_grad()
        expected: Any = build()
        optimizer = sgd(expected)
        for each in range(3):
            rows = [shard_batch(batch(each), r, ranks) for r in range(ranks if each == 0 else 1)]
            (sum(mean_loss(expected(part)) for part in rows) / ranks).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_like(model, expected)


# ---- DeepSpeed -----------------------------------------------------------------------------------------------------


def counted_in_a_step(accumulated: int = 3, **settings: str) -> tuple[int, int]:
    """Gathers and reductions of a group in a step of several micro-batches, which trains as a plain model does.

    `settings`: methods that are called with False for all micro-batches but the last.
    """
    model, log, steps = shard(build(), reshard_after_forward=False), [], 2
    modules = (model, *model.blocks)
    for module in modules:
        module.set_custom_all_gather(CountedGather(log, "gather"))
        module.set_custom_reduce_scatter(CountedReduceScatter(log, "reduce"))
    optimizer = sgd(model)
    for step in range(steps):
        for i in range(accumulated):
            for method in settings.values():
                getattr(model, method)(i == accumulated - 1)
            (mean_loss(model(own(accumulated * step + i))) / accumulated).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_like(model, plainly_trained(steps, accumulated))
    gathers, reductions = log.count("gather"), log.count("reduce")
    assert gathers % (steps * len(modules)) == reductions % (steps * len(modules)) == 0
    return gathers // steps // len(modules), reductions // steps // len(modules)


@row("DeepSpeed", "stage 1")
def stage_1() -> None:
    """Each group is gathered once a step, not once a micro-batch, and reduced once."""
    quiet = {"sync": "set_requires_gradient_sync", "stay": "set_reshard_after_backward"}
    assert counted_in_a_step(**quiet) == (1, 1)
    assert counted_in_a_step(sync=quiet["sync"]) == (3, 1)


@row("DeepSpeed", "stage 2")
def stage_2() -> None:
    assert counted_in_a_step(stay="set_reshard_after_backward") == (1, 3)


@row("DeepSpeed", "`zero_to_fp32.py`")
def a_file_of_all_without_ranks() -> None:
    """From a distributed checkpoint, by one process."""
    folder = [tempfile.mkdtemp() if of_first_rank() else ""]
    dist.broadcast_object_list(folder)
    try:
        torch.distributed.checkpoint.save(shard(build()).state_dict(), checkpoint_id=folder[0])
        if of_first_rank():
            dcp_to_torch_save(folder[0], f"{folder[0]}/whole.pt")
            loaded = build(seed=1)
            loaded.load_state_dict(torch.load(f"{folder[0]}/whole.pt"))
            assert_like(loaded, build(), 0)
        dist.barrier()
    finally:
        if of_first_rank():
            shutil.rmtree(folder[0])


@row("DeepSpeed", "`fp16`, `loss_scale`")
def fp16() -> None:
    model = shard(build(), mp_policy=MixedPrecisionPolicy(torch.float16, torch.float32))
    model.scale.data = model.scale.half()
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(2):
        scaler.scale(mean_loss(model(own(step)))).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert_like(model, plainly_trained(), 1e-2)


@row("DeepSpeed", "`offload_param`, `offload_optimizer`")
def offload_with_the_optimizer() -> None:
    model = shard(build(), offload_policy=CPUOffloadPolicy())
    optimizer = sgd(model)
    model.set_optimizer_in_backward(optimizer)
    for step in range(2):
        mean_loss(model(own(step))).backward()
    assert_like(model, plainly_trained())


@row("DeepSpeed", "`zero_hpz_partition_size`", ranks=4)
def a_part_stays() -> None:
    trains(shard(build(), reshard_after_forward=2))


@row("DeepSpeed", "`GatheredParameters(params)`")
def gathered_parameters() -> None:
    model, expected = shard(build()), build()
    with torch.no_grad(), full_params([model.stem.weight, model.head.bias], writeback=True) as (weight, bias):
        weight.fill_(2.0)
        bias.add_(1.0)
    with torch.no_grad():
        expected.stem.weight.fill_(2.0)
        expected.head.bias.add_(1.0)
    assert_like(model, expected, 0)


@row("DeepSpeed", "`stage3_prefetch_bucket_size`, `stage3_max_live_parameters`")
def prefetching() -> None:
    """By bytes, and by name: how much is gathered before block 1 computes."""
    none = order_in_a_step(lambda model: model.set_prefetch_budget(0))
    assert none.index("gathers 2") > none.index("computes 1")
    named = order_in_a_step(lambda model: model.set_modules_to_forward_prefetch([model.blocks[0], model.blocks[2]]))
    assert named.index("gathers 2") < named.index("computes 1")
    assert order_in_a_step(lambda model: None).index("gathers 2") < named.index("computes 1")


def wide() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))


def trained_wide(**options: Any) -> Tensor:
    """Returns all weights, behind two steps of `wide`, whose second layer has 4,096 elements."""
    model = wide()
    if options:
        fully_shard(model, mp_policy=MixedPrecisionPolicy(**options))
    optimizer = sgd(model)
    for step in range(2):
        mean_loss(model(own(step) if options else batch(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.full_tensor().flatten() if options else p.flatten() for p in model.parameters()]).detach()


@row("DeepSpeed", "`zero_quantized_weights`")
def weights_in_a_byte() -> None:
    for codec, tolerance in ((Int8(), 2e-3), (Float8(), 5e-3)):
        lost = (trained_wide(gather_codec=codec) - trained_wide()).abs().max()
        assert 0 < lost < tolerance, (codec, lost)


@row("DeepSpeed", "`zero_quantized_gradients`")
def gradients_in_a_byte() -> None:
    lost = (trained_wide(gradient_codec=Int8()) - trained_wide()).abs().max()
    assert 0 < lost < 2e-3, lost


@row("DeepSpeed", "`communication_data_type`")
def gradients_in_another_dtype() -> None:
    for field in ("reduce_dtype", "wire_dtype"):
        lost = (trained_wide(**{field: torch.bfloat16}) - trained_wide()).abs().max()
        assert 0 < lost < 2e-3, (field, lost)


@row("DeepSpeed", "`stage3_param_persistence_threshold`")
def small_parameters_stay() -> None:
    model, log = build(), []
    fully_shard(model.blocks[0], reshard_after_forward=False)
    shard_rest = [fully_shard(block) for block in model.blocks[1:]]
    fully_shard(model)
    assert len(shard_rest) == 2
    model.blocks[0].set_custom_all_gather(CountedGather(log, "gather"))  # type: ignore[operator]
    trains(model)
    assert len(log) == 2, "gathered anew in backward"


# ---- torch's FSDP2 -------------------------------------------------------------------------------------------------


@row("torch's FSDP2", "`from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy, ...`")
def all_of_torchs_names() -> None:
    theirs = {name for name in torchs.__all__ if getattr(torchs, name).__module__ == "torch.distributed.fsdp"}
    assert {"fully_shard", "FSDPModule", "MixedPrecisionPolicy"} <= theirs
    assert sorted(name for name in theirs if not hasattr(fsdp2, name)) == []
    methods = {name for name in vars(torchs.FSDPModule) if not name.startswith("_")}
    assert sorted(name for name in methods if not hasattr(FSDPModule, name)) == []


@row("torch's FSDP2", "`isinstance(module, torch.distributed.fsdp.FSDPModule)` in code that you do not edit")
def patched() -> None:
    with fsdp2.patch_torch():
        model = torchs.fully_shard(build())
        assert isinstance(model, torchs.FSDPModule)
        assert isinstance(model, FSDPModule)
        trains(model)


@row("torch's FSDP2", "`replicate` of `torch.distributed._composable`")
def replicate_of_ours() -> None:
    trains(replicate(build()))


@row("torch's FSDP2", "`torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()`")
def norm_of_all() -> None:
    model, expected = shard(build()), build()
    mean_loss(model(own(0))).backward()
    mean_loss(expected(batch(0))).backward()
    plain = nn.utils.clip_grad_norm_(expected.parameters(), 100.0)
    theirs = nn.utils.clip_grad_norm_(model.parameters(), 100.0)
    ours = fsdp2.clip_grad_norm_(model.parameters(), 100.0)
    assert isinstance(theirs, DTensor)
    assert type(ours) is Tensor
    assert_same(theirs.full_tensor(), plain, 1e-5, 1e-6, "torch's norm")
    assert_same(ours, plain, 1e-5, 1e-6, "our norm")


@row(
    "torch's FSDP2",
    "`fully_shard(model).set_requires_gradient_sync(False)` in a program that a type checker reads",
)
def typed() -> None:
    model = build()
    fully_shard(model).set_requires_gradient_sync(False)
    assert isinstance(model, FSDPModule)
    assert isinstance(model, Net)


@row("torch's FSDP2", "`set_symm_mem_for_comm()` where collectives do not run on NCCL")
def symmetric_memory() -> None:
    model: Any = fully_shard(build())
    with pytest.raises(RuntimeError, match="they run on gloo for tensors on cpu"):
        model.set_symm_mem_for_comm()


# ---- every row -----------------------------------------------------------------------------------------------------


def test_every_row_has_a_program() -> None:
    """Or its test is named in tests/BEHAVIOURS.md (tests/unit/test_behaviours.py holds that it exists)."""
    rows = {(name, cells[0]) for name, heading in TABLES.items() for cells in ROWS[heading]}
    named = {("torch's FSDP2", cell) for cell in DIFFERENCES}
    assert named - rows == set()
    assert rows - named == PROGRAMS.keys()
    assert len(rows) == sum(len(ROWS[heading]) for heading in TABLES.values()), "two rows begin alike"


@pytest.mark.parametrize("ranks", sorted({ranks for ranks, _ in PROGRAMS.values()}))
def test_programs_that_come_from_elsewhere(ranks: int) -> None:
    programs = {program: None for size, program in PROGRAMS.values() if size == ranks}  # some stand for two rows
    run_checks(ranks, [(program.__name__, program) for program in programs])
