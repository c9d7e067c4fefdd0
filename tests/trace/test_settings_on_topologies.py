"""Tests that every setting on every topology works, has no effect because it holds anyway, or is refused.

The fault in question: a setting is accepted and ignored, because there is nothing that it could affect on the mesh.
`TABLE` has the expected case for each setting and topology, and the tests compare that with what a model does in two
steps, on one rank whose peers are simulated. The judgement is that of a user who runs one program on 1 and on 8 ranks:
a setting that is legitimate on several ranks must work on one; a function that several ranks would never call, or a
number that they would never use, is refused. A docstring must say where a setting holds anyway. test_every_setting.py
(one of four ranks) and ranks/test_settings.py (numbers) test that a setting does what it says.
"""

import contextlib
import dataclasses
import inspect
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from recorder import RecordingComm
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fsdp2
from fsdp2 import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FSDPModule,
    MixedPrecisionPolicy,
    ShardPlacementResult,
    fully_shard,
    register_fsdp_forward_method,
    replicate,
    share_comm_ctx,
)
from fsdp2.compression import Compression
from fsdp2.dtensor.sharded_dtensor import ShardedDTensor
from fsdp2.engine import codec
from fsdp2.engine.group import Comms
from fsdp2.engine.state import groups_below, require_state
from helpers import fake_world, public_methods

BF16 = torch.bfloat16

# ---- topologies ------------------------------------------------------------------------------------------------------


class Part(nn.Module):
    """Its backward reads no weight; one parameter is never used."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight, self.unused = (nn.Parameter(torch.ones(*shape)) for shape in ((rows, 4), (4, 4)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight.sum(0)


class Norm(nn.BatchNorm1d):
    """Has running statistics; computes nothing, so that DTensors pass, too."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class Model(nn.Module):
    """Three blocks, and parameters of its own, or none."""

    def __init__(self, has_own: bool = True) -> None:
        super().__init__()
        if has_own:
            self.weight = nn.Parameter(torch.ones(4, 4))
        self.a, self.b, self.c, self.norm = Part(8), Part(16), Part(24), Norm(4, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.c(self.b(self.a(x))))
        return x + self.weight.sum(0) if hasattr(self, "weight") else x

    def encode(self) -> str:
        """How a parameter lies."""
        weight = self.weight if hasattr(self, "weight") else self.a.weight
        return f"{type(weight)} {getattr(weight, 'placements', None)}"


@dataclasses.dataclass(frozen=True)
class Topology:
    """How many ranks there are, the shape of their mesh, and by which function modules are distributed over it.

    `is_empty`: the root has no parameters of its own, and only its own group is set.
    """

    ranks: int
    shape: tuple[int, ...]
    function: Any = fully_shard
    is_named: bool = False
    is_empty: bool = False

    def build(self, options: dict[str, Any], ignores: bool) -> Any:
        model, mesh = Model(not self.is_empty), self._mesh()
        if self.is_named:
            options = {"dp_mesh_dims": DataParallelMeshDims(shard="shards", replicate="replicas"), **options}
            for module in model.modules():
                for name, parameter in module.named_parameters(recurse=False):
                    whole = distribute_tensor(parameter.detach(), mesh, [Replicate(), Replicate()])
                    setattr(module, name, nn.Parameter(whole))
        if ignores:
            options = {**options, "ignored_params": {part.unused for part in (model.a, model.b, model.c)}}
        unconditional = {name: value for name, value in options.items() if name != "conditional"}
        for block in (model.a, model.b, model.c):
            self.function(block, mesh=mesh, **({} if self.is_empty else options))
        return self.function(model, mesh=mesh, **unconditional)

    def _mesh(self) -> Any:
        return init_device_mesh("cpu", self.shape, mesh_dim_names=("replicas", "shards")[: len(self.shape)])

    def input(self) -> Tensor:
        x = torch.ones(2, 4, requires_grad=True)
        return distribute_tensor(x, self._mesh(), [Replicate(), Replicate()]) if self.is_named else x


TOPOLOGIES = {
    "4 ranks": Topology(4, (4,)),
    "2 x 2": Topology(4, (2, 2)),
    "2 x 1": Topology(2, (2, 1)),
    "1 x 2": Topology(2, (1, 2)),
    "4 replicas": Topology(4, (4,), replicate),
    "1 rank": Topology(1, (1,)),
    "1 replica": Topology(1, (1,), replicate),
    "named": Topology(4, (2, 2), is_named=True),
    "empty": Topology(4, (4,), is_empty=True),
}

# ---- settings --------------------------------------------------------------------------------------------------------


class Refused(str):
    """Words of the error, which comes before anything has changed."""


W, H = "works", "holds anyway"
NO_ARGUMENT = Refused("unexpected keyword argument")
NEVER_CALLED = Refused("expected None on .*would never be called")
Cell = str


@dataclasses.dataclass
class Row:
    """A setting: its outcome on each topology, and how it is made.

    Of two models only one has the setting. `options` (of the calls that distribute its modules), `ignores` (some of its
    parameters) make it; or `configure(model, recurse)` does; or `after(model)`, behind each backward.
    `both`: options of both models; `prepare(model)`: called on both before `configure`. `twice`: two forwards come
    before two backwards. `averages`: ranks average running statistics, as if others were not simulated.
    """

    cells: tuple[Cell, ...]
    configure: Callable[[Any, bool], object] = lambda model, recurse: None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    both: dict[str, Any] = dataclasses.field(default_factory=dict)
    prepare: Callable[[Any], object] = lambda model: None
    after: Callable[[Any], object] = lambda model: None
    twice: bool = False
    averages: bool = False
    ignores: bool = False

    def __post_init__(self) -> None:
        assert len(self.cells) == len(TOPOLOGIES)


def call(method: str, *args: Any, **options: Any) -> Callable[[Any, bool], object]:
    """Calls it on the root, for all groups below if it has `recurse`."""
    takes_recurse = "recurse" in inspect.signature(getattr(FSDPModule, method)).parameters
    return lambda model, recurse: getattr(model, method)(
        *args, **options, **({"recurse": recurse} if takes_recurse else {})
    )


def each(method: str, value: Any) -> Callable[[Any, bool], object]:
    """Calls what has no `recurse` on all sharded modules, or on the empty one."""

    def configure(model: Any, recurse: bool) -> None:
        for module in model.modules() if recurse else [model]:
            if isinstance(module, FSDPModule):
                getattr(module, method)(value)

    return configure


class Calls:
    """A user's collective, hook or event. Counts how often any is used."""

    count = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    def __call__(self, *args: Any, **arguments: Any) -> None:
        Calls.count += 1

    def wait(self) -> None:
        Calls.count += 1


others: list[Any] = []
contexts = contextlib.ExitStack()


BETWEEN = Refused("between replicas")


def halved(state: Any, bucket: Any) -> Any:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer() / 2)
    return future


def halved_shard(state: Any, gradient: Tensor, shard: Tensor) -> None:
    shard.copy_(gradient[: shard.numel()] / 2)


def share(model: Any, recurse: bool) -> None:
    """With a root that, behind each backward, has a reduction in flight."""
    others[:] = [fully_shard(nn.Linear(2, 2))]
    others[0].set_manual_backward_finalization(True)
    share_comm_ctx([model, model.a, *others])


def use_other(model: Any) -> None:
    others[0](torch.ones(1, 2)).sum().backward()


def keep_all(model: Any) -> None:
    model.set_reshard_after_forward(False)


def free_all(model: Any) -> None:
    model.set_reshard_after_forward(True)


def finalize_by_hand(model: Any) -> None:
    model.set_manual_backward_finalization(True)


def policy(**fields: Any) -> dict[str, Any]:
    return {"mp_policy": MixedPrecisionPolicy(**fields)}


def step_in_backward(model: Any, recurse: bool) -> None:
    model.set_optimizer_in_backward(torch.optim.SGD(model.parameters(), lr=0.1))


FREED = {"reshard_after_forward": True}

# In the order of TOPOLOGIES: 4 ranks, 2 x 2, 2 x 1, 1 x 2, 4 replicas, 1 rank, 1 replica, named, empty.
# What works on all but, maybe, the last; where there are several ranks; where several share parameters.
ALL, EACH, SEVERAL, SHARING = (W,) * 9, (W,) * 8, (W, W, W, W, W, H, H, W), (W, W, H, W, H, H, H, W)
NO_NCCL = Refused("run on NCCL")
TABLE: dict[str, Row] = {
    "unshard": Row((*EACH, H), call("unshard")),
    "reshard": Row((*EACH, H), call("reshard"), prepare=lambda model: model.unshard()),
    "set_requires_gradient_sync": Row((*EACH, H), call("set_requires_gradient_sync", False)),
    "no_sync": Row(ALL, lambda model, _: contexts.enter_context(model.no_sync()), prepare=lambda _: contexts.close()),
    "set_requires_all_reduce": Row((H, W, W, H, W, H, H, W, H), call("set_requires_all_reduce", False)),
    "set_reshard_after_forward": Row((*SHARING, H), call("set_reshard_after_forward", True), prepare=keep_all),
    "set_reshard_after_backward": Row((*SHARING, H), call("set_reshard_after_backward", False)),
    "set_unshard_in_backward": Row((*SHARING, H), call("set_unshard_in_backward", False), prepare=free_all),
    "set_modules_to_forward_prefetch": Row(
        (*SHARING, W), lambda model, _: model.set_modules_to_forward_prefetch([model.b])
    ),
    "set_modules_to_backward_prefetch": Row(
        (*SHARING, W),
        lambda model, _: model.c.set_modules_to_backward_prefetch([model.a]),
        prepare=free_all,
    ),
    "set_reduce_scatter_unused_params": Row((*EACH, H), call("set_reduce_scatter_unused_params", True)),
    "set_reduce_scatter_max_input_buffers": Row((*SEVERAL, W), call("set_reduce_scatter_max_input_buffers", 4)),
    "set_gradient_buckets": Row((*EACH, H), call("set_gradient_buckets", 1)),
    "set_gradient_divide_factor": Row((*EACH, H), call("set_gradient_divide_factor", 3)),
    "set_reduce_scatter_divide_factor": Row((*EACH, H), each("set_reduce_scatter_divide_factor", 3)),
    "set_force_sum_reduction_for_comms": Row((*SEVERAL, H), call("set_force_sum_reduction_for_comms", True)),
    "set_all_reduce_hook": Row((*EACH, H), call("set_all_reduce_hook", Calls())),
    "set_all_reduce_hook(stream)": Row(
        (Refused("stream"),) * 9, call("set_all_reduce_hook", Calls(), stream=torch.Stream)
    ),
    "register_comm_hook": Row(
        (Refused("without replicas"), W, W, H, W, H, H, W, Refused("without replicas")),
        lambda model, recurse: model.register_comm_hook(None, halved),
    ),
    "register_comm_hook(FSDP1's)": Row(
        (W, BETWEEN, BETWEEN, BETWEEN, BETWEEN, H, BETWEEN, BETWEEN, W),
        lambda model, recurse: model.register_comm_hook(None, halved_shard),
    ),
    "set_custom_all_gather": Row(
        (W, W, NEVER_CALLED, W, NEVER_CALLED, H, H, W, H),
        each("set_custom_all_gather", Calls()),
    ),
    "set_custom_reduce_scatter": Row(
        (W, W, NEVER_CALLED, W, NEVER_CALLED, H, H, W, H),
        each("set_custom_reduce_scatter", Calls()),
    ),
    "set_separate_reduce_scatter_group": Row((*SHARING, H), call("set_separate_reduce_scatter_group")),
    "set_allocate_memory_from_process_group_for_comm": Row(
        (H,) * 9, call("set_allocate_memory_from_process_group_for_comm", True)
    ),
    "set_symm_mem_for_comm": Row((*(NO_NCCL,) * 5, H, H, NO_NCCL, NO_NCCL), call("set_symm_mem_for_comm")),
    "set_keep_unsharded_storage": Row((*SHARING, H), call("set_keep_unsharded_storage", True)),
    "set_free_viewed_storage": Row((H,) * 9, call("set_free_viewed_storage", True)),
    "set_unsharded_budget": Row((*SHARING, W), call("set_unsharded_budget", 0)),
    "set_running_stats_averaging": Row((*SEVERAL, W), call("set_running_stats_averaging", False), averages=True),
    "set_conditional": Row((*SEVERAL, W), lambda model, _: model.b.set_conditional()),
    "set_is_last_backward": Row((*SHARING, W), call("set_is_last_backward", False), prepare=free_all, twice=True),
    "set_post_optim_event": Row(ALL, call("set_post_optim_event", Calls())),
    "set_optimizer_in_backward": Row(ALL, step_in_backward),
    "set_manual_backward_finalization": Row(ALL, call("set_manual_backward_finalization", True)),
    "finalize_backward": Row(
        ALL,
        prepare=finalize_by_hand,
        after=lambda model: model.finalize_backward(),
    ),
    "reset_iter_state": Row(
        ALL,
        prepare=lambda model: model.set_requires_gradient_sync(False),
        after=lambda model: model.reset_iter_state(),
    ),
    "share_comm_ctx": Row(ALL, share, prepare=finalize_by_hand, after=use_other),
    "register_fsdp_forward_method": Row((*EACH, H), lambda model, _: register_fsdp_forward_method(model, "encode")),
    "reshard_after_forward": Row((W, W, H, W, NO_ARGUMENT, H, NO_ARGUMENT, W, H), options=FREED),
    "reshard_after_forward=2": Row(
        (W, W, Refused("only replicates"), W, NO_ARGUMENT, H, NO_ARGUMENT, W, H), options={"reshard_after_forward": 2}
    ),
    "shard_placement_fn": Row(
        (W, W, W, W, NO_ARGUMENT, W, NO_ARGUMENT, W, H), options={"shard_placement_fn": lambda parameter: Shard(1)}
    ),
    "offload_policy": Row((H,) * 9, options={"offload_policy": CPUOffloadPolicy()}),
    "CPUOffloadPolicy(pin_memory)": Row((H,) * 9, options={"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "ignored_params": Row((*EACH, H), ignores=True),
    "conditional": Row((*SEVERAL, H), options={"conditional": True}),
    "mp_policy(param_dtype)": Row(ALL, options=policy(param_dtype=BF16)),
    "mp_policy(reduce_dtype)": Row((*EACH, H), options=policy(reduce_dtype=BF16)),
    "mp_policy(grad_dtype)": Row((*(W,) * 8, H), options=policy(grad_dtype=torch.float64)),
    "mp_policy(output_dtype)": Row(ALL, options=policy(output_dtype=torch.float64)),
    "mp_policy(buffer_dtype)": Row(ALL, options=policy(buffer_dtype=torch.float64)),
    "mp_policy(cast_forward_inputs)": Row(
        ALL, both=policy(param_dtype=BF16), options=policy(param_dtype=BF16, cast_forward_inputs=False)
    ),
    "mp_policy(param_dtype_override_fn)": Row(
        (*EACH, H),
        both=policy(param_dtype=BF16),
        options=policy(param_dtype=BF16, param_dtype_override_fn=lambda parameter: parameter.dtype),
    ),
    "mp_policy(compression.reduce_scatter)": Row(
        (W, W, W, W, Refused("only replicates"), W, Refused("only replicates"), W, H),
        options=policy(compression=Compression(reduce_scatter=BF16)),
    ),
    "mp_policy(compression.all_gather)": Row(
        (W, W, H, W, Refused("only replicates"), H, Refused("only replicates"), W, H),
        options=policy(compression=Compression(all_gather=BF16)),
    ),
    "mp_policy(compression.all_reduce)": Row(
        (Refused("without replicas"), W, W, H, W, Refused("without replicas"), H, W, H),
        options=policy(compression=Compression(all_reduce=BF16)),
    ),
}

# ---- what can be seen of a model -------------------------------------------------------------------------------------


class SeenComm(RecordingComm):
    """Writes down how it is asked to reduce, too, and by which kind of Comm."""

    def all_gather(self, outputs: Any, inputs: Any) -> Any:
        self._lines.append(type(self._inner).__name__)
        return super().all_gather(outputs, inputs)

    def reduce_scatter(self, outputs: Any, inputs: Any, divisor: float, what: str = "") -> Any:
        self._note(divisor)
        return super().reduce_scatter(outputs, inputs, divisor, what)

    def exchange(self, sent: Any, what: str = "") -> Any:
        self._note(self.size)
        return super().exchange(sent, what)

    def all_reduce(self, tensor: Tensor, divisor: float, what: str = "") -> Any:
        self._note(divisor)
        return super().all_reduce(tensor, divisor, what)

    def _note(self, divisor: float) -> None:
        usual = self._owner.mesh.shard_group, self._owner.mesh.replicate_group
        how = "sum" if self.force_sum else "mean", "as usual" if self.group in usual else "beside"
        self._lines.append(f"by {divisor}, {how}, {type(self._inner).__name__}")


def watch(model: Any, lines: list[str]) -> None:
    """From now on, write down what its groups do, and when its modules run."""
    for group in groups_below(model):
        gathers, reduces, replicas, post_forward = group.comms
        seen = [None if comm is None else SeenComm(comm, group, lines) for comm in (gathers, reduces, replicas)]
        group.use_comms(Comms(*seen, post_forward))  # type: ignore[arg-type]
        if post_forward is not None:
            lines.append("post-forward ranks")

    def show_backward(name: str, output: Tensor) -> None:
        output.register_hook(lambda _: lines.append(f"back {name}"))

    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda _, args, name=name: lines.append(f"run {name} {args[0].dtype}"))
        module.register_forward_hook(lambda _, args, out, name=name: show_backward(name, out))
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: lines.append(f"grad {name}"))
    saved = require_state(model).root.saved_tensors
    activate = saved.activate

    def activated(depth: int) -> None:
        lines.append("saved tensors are watched")
        activate(depth)

    saved.activate = activated


def show(gradient: Tensor | None) -> Any:
    """Its kind; where the rank holds all of it, its values: others are simulated."""
    if type(gradient) is not ShardedDTensor:
        return type(gradient)
    local = gradient.to_local()
    return gradient.dtype, local.shape, local.tolist() if local.shape == gradient.shape else None


def resting_bytes(model: Any) -> list[int]:
    """Of the unsharded parameters, between passes."""
    groups = groups_below(model)
    return [0 if group.parameters.buffers.layout.aliased else group.unsharded.storage.nbytes() for group in groups]


def train(topology: Topology, model: Any, row: Row, with_it: bool) -> torch.dtype:
    """Return the dtype of its output."""
    outputs = [model(topology.input()) for _ in range(1 + row.twice)]
    for output in reversed(outputs):
        (output * 0.3).sum().backward()
    if with_it:
        row.after(model)
    return outputs[0].dtype


def look(topology: Topology, row: Row, with_it: bool) -> dict[str, Any]:
    """What can be seen of two steps, with the setting or without."""
    options, lines = {**row.both, **(row.options if with_it else {})}, list[str]()

    def note_statistics(*_: Any, **__: Any) -> None:
        lines.append("statistics")

    def connects(mesh: Any) -> bool:
        return row.averages and mesh.num_ranks > 1

    with (
        mock.patch("fsdp2.features.running_stats.connects", connects),
        mock.patch("fsdp2.features.running_stats.all_reduce_over", note_statistics),
        fake_world(topology.ranks),
    ):
        model = topology.build(options, row.ignores and with_it)
        row.prepare(model)
        Calls.count = 0
        if with_it:
            row.configure(model, not topology.is_empty)
        seen: dict[str, Any] = {"entry point": model.encode(), "buffers": [each.dtype for each in model.buffers()]}
        seen["parameters"] = [(type(p), str(getattr(p, "placements", ""))) for p in model.parameters()]
        watch(model, lines)
        for i in range(2):
            lines.clear()
            model.zero_grad()
            seen["output"] = train(topology, model, row, with_it)
            seen[f"step {i}"] = [*lines]
        seen["gradients"] = [show(parameter.grad) for parameter in model.parameters()]
        seen["versions"] = [parameter._version for parameter in model.parameters()]
        seen["bytes"] = resting_bytes(model)
        seen["calls"] = Calls.count
        seen["meet"] = type(require_state(model).root.consensus).__name__
    return seen


# ---- tests -----------------------------------------------------------------------------------------------------------

plain: dict[Any, dict[str, Any]] = {}


def look_without(topology: Topology, row: Row) -> dict[str, Any]:
    """The same for all rows that differ in nothing but the setting."""
    key = topology, row.prepare, tuple(row.both.items()), row.twice, row.averages
    if key not in plain:
        plain[key] = look(topology, row, with_it=False)
    return plain[key]


def outcome(topology: Topology, row: Row) -> Cell:
    """What the setting comes to."""
    try:
        with_it = look(topology, row, with_it=True)
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        return Refused(error)
    return W if with_it != look_without(topology, row) else H


@pytest.fixture(autouse=True)
def small_parameters_are_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "SMALL_NUMEL", 1)


@pytest.mark.parametrize("setting", TABLE)
def test_the_outcome_is_that_of_the_table(setting: str) -> None:
    row = TABLE[setting]
    for (name, topology), cell in zip(TOPOLOGIES.items(), row.cells, strict=True):
        got = outcome(topology, row)
        assert type(got) is type(cell), f"{setting} on {name}: expected {cell!r}, got {got!r}"
        assert re.search(cell, got), f"{setting} on {name}: expected {cell!r}, got {got!r}"


@pytest.mark.parametrize("setting", [setting for setting, row in TABLE.items() if H in row.cells[:-1]])
def test_settings_that_hold_anyway_are_documented(setting: str) -> None:
    """In the docstring of the method, of the function that takes the argument, or of the policy that has the field."""
    name = {
        "CPUOffloadPolicy(pin_memory)": "CPUOffloadPolicy",
        "register_comm_hook(FSDP1's)": "register_comm_hook",
    }.get(setting, setting)
    name = "MixedPrecisionPolicy" if setting.startswith("mp_policy") else name
    owner = getattr(FSDPModule, name, None) or getattr(fsdp2, name, None)
    owner = Compression if "compression." in setting else owner
    text = " ".join((owner or fully_shard).__doc__.split())
    if owner is None:  # one of its arguments
        text = text.partition(f" {name.partition('=')[0]}: ")[2]
    assert re.search("[oO]n one rank|[oO]ne rank|whole parameters|nothing is gathered|mesh of CPUs", text), text


def test_every_setting_is_in_the_table() -> None:
    """Each method, argument, field and function that takes one."""
    arguments = {*inspect.signature(fully_shard).parameters} - {"module", "mp_policy"}
    fields = {f"mp_policy({field.name})" for field in dataclasses.fields(MixedPrecisionPolicy)}
    fields.remove("mp_policy(compression)")
    fields |= {f"mp_policy(compression.{field.name})" for field in dataclasses.fields(Compression)}
    fields |= {f"CPUOffloadPolicy({field.name})" for field in dataclasses.fields(CPUOffloadPolicy)}
    functions = {"register_fsdp_forward_method", "share_comm_ctx"}
    topologies = {"mesh", "dp_mesh_dims"}  # each makes columns
    variants = {"set_all_reduce_hook(stream)", "reshard_after_forward=2", "register_comm_hook(FSDP1's)"}
    assert {*TABLE} - variants == (public_methods() | arguments | fields | functions) - topologies
    assert {*inspect.signature(replicate).parameters} < {*inspect.signature(fully_shard).parameters}


def test_values_that_ask_for_nothing() -> None:
    """What a program may say on any topology, for there is nothing to do."""
    for topology in TOPOLOGIES.values():
        with fake_world(topology.ranks):
            model = topology.build({}, ignores=False)
            model.set_allocate_memory_from_process_group_for_comm(False)
            model.set_custom_all_gather(None)
            model.set_custom_reduce_scatter(None)
            model.set_all_reduce_hook(None)
            model.set_post_optim_event(None)
            model.set_optimizer_in_backward(None)
            share_comm_ctx([])
            share_comm_ctx([model])


@pytest.mark.parametrize(
    ("method", "value"),
    [
        ("set_custom_all_gather", print),
        ("set_custom_reduce_scatter", print),
        ("set_all_reduce_hook", 1),
        ("set_post_optim_event", 1),
    ],
)
def test_unusable_values_are_refused_by_type(method: str, value: Any) -> None:
    """Also where it would not be used."""
    for topology in (TOPOLOGIES["4 ranks"], TOPOLOGIES["1 rank"]):
        with fake_world(topology.ranks), pytest.raises(TypeError, match=r"^\w+: expected a"):
            getattr(topology.build({}, ignores=False), method)(value)


def test_a_module_that_reaches_several_meshes_needs_one_that_scatters() -> None:
    """Experts of one rank beside what four share."""
    with fake_world(4):
        own = init_device_mesh("cpu", (4, 1), mesh_dim_names=("others", "own"))["own"]
        model: Any = Model()
        fully_shard(model, shard_placement_fn=lambda p: ShardPlacementResult(None, own) if len(p) == 24 else None)
        model.set_custom_reduce_scatter(Calls())
        Calls.count = 0
        model(torch.ones(2, 4)).sum().backward()
        assert Calls.count > 0


def test_a_placement_that_shards_nothing_is_refused() -> None:
    with fake_world(4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("replicas",))
        for placement, how in (
            (None, nullcontext()),
            (Shard(1), pytest.raises(ValueError, match="shard_placement_fn")),
        ):
            with how:
                fully_shard(
                    Part(4),
                    mesh=mesh,
                    dp_mesh_dims=DataParallelMeshDims(replicate="replicas"),
                    shard_placement_fn=lambda parameter, placement=placement: placement,
                )
