"""Tests parameters of users' classes whose values lie in memory of their own: tags, packed values, their attributes.

They are compared with models of the same classes that are not sharded.
"""

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from fsdp2 import (
    MixedPrecisionPolicy,
    clip_grad_norm_,
    compare,
    flatten_optimizer,
    full_params,
    fully_shard,
    replicate,
    sync_module_states,
)
from helpers import assert_same, full, run_checks
from models import mean_loss
from scenarios import train_beside

WIDTH, ROWS, DTYPE = 6, 5, torch.float64


class Tagged(nn.Parameter):
    """A tag, and nothing else."""


class Scaled(nn.Parameter):
    """Holds multiples of a scale, by a constructor, a property and a default of its own."""

    scale = 1.0

    def __new__(cls, data: Tensor, scale: float) -> Any:
        made = Tensor._make_subclass(cls, data, True)
        made.scale = scale
        return made

    @property
    def twice(self) -> float:
        return 2 * self.scale


class Watched(nn.Parameter):
    """Sees every function that is called with it, and computes that of linear layers itself."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is nn.functional.linear:
                x, weight, *_ = args
                return x @ weight.T * weight.factor
            return func(*args, **(kwargs or {}))


class OwnTensor(Tensor):
    """No nn.Parameter by its class: results of operations on it are of this class, too."""


class Dispatching(nn.Parameter):
    """Has a `__torch_dispatch__`, as wrappers of other tensors have, and memory of its own."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C._DisableTorchDispatch():
            return func(*args, **(kwargs or {}))


class Packed(nn.Parameter):
    """Int8 values of which each four lie in one fp32 number, whose bits mean nothing as such."""

    def __new__(cls, data: Tensor, largest: Tensor, shape: Any) -> Any:
        made = Tensor._make_subclass(cls, data, False)
        made.largest, made.packed_shape = largest, shape
        return made

    def values(self) -> Tensor:
        plain = self.as_subclass(Tensor).view(torch.int8)
        return plain.view(self.packed_shape).float() * self.largest / 127


def packed(values: Tensor) -> Packed:
    largest = values.abs().amax(1, keepdim=True)
    quantised = (values / largest * 127).round().to(torch.int8)
    return Packed(quantised.flatten().view(torch.float32).unsqueeze(1), largest, values.shape)


class Model(nn.Module):
    """Its forward asks each parameter for its class and attributes."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.checkpointed = checkpointed
        self.head = nn.Linear(WIDTH, ROWS, dtype=DTYPE)
        self.head.weight = Tagged(self.head.weight.data)
        self.tail = nn.Linear(ROWS, WIDTH, dtype=DTYPE)
        self.tail.weight = Scaled(self.tail.weight.data, 3.0)
        self.watched = nn.Linear(WIDTH, WIDTH, bias=False, dtype=DTYPE)
        self.watched.weight = Watched(self.watched.weight.data)
        self.watched.weight.factor = 0.5  # type: ignore[attr-defined]
        self.own = nn.Parameter(torch.randn(ROWS, WIDTH, dtype=DTYPE).as_subclass(OwnTensor))
        self.gate = Tagged(torch.tensor(0.7, dtype=DTYPE))
        self.frozen = Tagged(torch.randn(WIDTH, dtype=DTYPE), requires_grad=False)
        self.packed = packed(torch.randn(8, WIDTH))

    def body(self, x: Tensor) -> Tensor:
        assert type(self.head.weight) is type(self.gate) is type(self.frozen) is Tagged
        assert type(self.tail.weight) is Scaled
        assert type(self.own) is OwnTensor
        assert isinstance(self.own, nn.Parameter)
        scale = self.tail.weight.scale * self.tail.weight.twice / 18
        y = torch.tanh(self.watched(x)) + torch.tanh(x @ self.own.T @ self.own).as_subclass(Tensor)
        y = nn.functional.linear(torch.tanh(self.head(y)), self.tail.weight * scale, self.tail.bias)
        return torch.tanh(y @ self.packed.values().T.to(y)) @ self.packed.values().to(y) * self.gate + self.frozen

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x)


def batch(seed: int) -> Tensor:
    return torch.randn(12, WIDTH, dtype=DTYPE, generator=torch.Generator().manual_seed(seed))


def two_models(checkpointed: bool = False) -> tuple[nn.Sequential, nn.Sequential]:
    model, plain = (nn.Sequential(Model(checkpointed), Model(checkpointed)) for _ in range(2))
    return model, plain


def trains(mesh: Callable[[], Any] = lambda: None, checkpointed: bool = False, **options: Any) -> None:
    model, plain = two_models(checkpointed)
    for part in (*model, model):
        fully_shard(part, mesh=mesh(), **options)
    train_beside(model, plain, batch)
    for each in model:
        sharded: Any = each.tail.weight
        assert (sharded.scale, sharded.twice, each.packed.packed_shape) == (3.0, 6.0, (8, WIDTH))
        assert_same(full(each.packed), each_plain_packed(plain), 0, 0, "packed bits")


def each_plain_packed(plain: nn.Sequential) -> Tensor:
    first: Any = plain[0]
    return first.packed.as_subclass(Tensor)  # type: ignore[no-any-return]


def trains_in_bf16() -> None:
    """What the user's function names stays as it is; trained parameters, and bare tags, are cast."""

    def keep(param: nn.Parameter) -> torch.dtype | None:
        return param.dtype if isinstance(param, Packed) else None

    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float64, param_dtype_override_fn=keep)
    model, plain = two_models()
    for part in (*model, model):
        fully_shard(part, mp_policy=policy)
    dtypes: dict[str, torch.dtype] = {}
    model[0].register_forward_hook(
        lambda module, *_: dtypes.update({name: param.dtype for name, param in module.named_parameters()})
    )
    mean_loss(model(batch(0).chunk(dist.get_world_size())[dist.get_rank()])).backward()
    mean_loss(plain(batch(0))).backward()
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_same(param.grad, expected.grad, 0.1, 0.02, name)
    assert dtypes.pop("packed") == torch.float32
    assert {*dtypes.values()} == {torch.bfloat16}


def says_that_a_cast_may_destroy_bits() -> None:
    """The advice, followed: each of both choices."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"^packed: expected a frozen Packed.*param_dtype_override_fn=lambda p: p\."):
        fully_shard(Model(), mp_policy=policy)
    for dtype in (torch.float32, torch.bfloat16):
        policy = MixedPrecisionPolicy(
            torch.bfloat16, param_dtype_override_fn=lambda p, chosen=dtype: chosen if isinstance(p, Packed) else None
        )
        model: Any = fully_shard(Model(), mp_policy=policy)
        model.unshard()
        assert model.packed.dtype == dtype
        assert model.frozen.dtype == torch.bfloat16
        model.reshard()


def is_copied() -> None:
    """deepcopy, pickle, `full_params`, and a forward of each."""
    model, plain = two_models()
    for part in (*model, model):
        fully_shard(part)
    expected = plain(batch(0))
    mine = partial(assert_same, expected=expected, rtol=1e-6, atol=1e-6)
    copied = copy.deepcopy(model)
    mine(copied(batch(0)), name="deepcopy")
    copied[0].tail.weight.scale = 7.0
    mine(model(batch(0)), name="attributes of the copy are its own")
    if dist.get_world_size() == 1:
        mine(pickle.loads(pickle.dumps(model))(batch(0)), name="pickle")
    train_beside(copy.deepcopy(model), two_models()[1], batch)
    for options in {}, {"offload_to_cpu": True}, {"writeback": True}:
        with full_params(model, **options):
            assert [type(param) for param in model.parameters()] == [type(param) for param in plain.parameters()]
            assert model[1].tail.weight.scale == 3.0
            if options:
                mine(nn.Sequential(*(_plain_copy(part) for part in model))(batch(0)), name=f"{options}")
    with full_params(model, writeback=True):
        model[0].tail.weight.mul_(2)
    plain[0].tail.weight.data.mul_(2)
    assert_same(model(batch(1)), plain(batch(1)), 1e-6, 1e-6, "written back")


def _plain_copy(part: Any) -> Model:
    twin = Model()
    for name, param in part.named_parameters():
        module, _, last = name.rpartition(".")
        twin.get_submodule(module)._parameters[last] = param
    return twin


def is_saved_and_loaded(folder: Any) -> None:
    """Through each way: values of other models arrive, classes and attributes stay."""
    source, plain = two_models()
    with torch.no_grad():
        for param in plain.parameters():
            param.copy_(torch.randn(param.shape, generator=torch.Generator().manual_seed(1)).to(param))
        for param in source.parameters():
            param.copy_(torch.randn(param.shape, generator=torch.Generator().manual_seed(1)).to(param))
    fully_shard(source)
    expected = plain(batch(0))

    def assert_arrived(model: Any, how: str) -> None:
        assert_same(model(batch(0)), expected, 1e-6, 1e-6, how)
        train_beside(model, copy_of(plain), batch)

    whole = {name: param.detach().as_subclass(Tensor).clone() for name, param in plain.named_parameters()}
    for assign, state in (False, source.state_dict()), (True, source.state_dict()), (True, whole):
        model = fully_shard(two_models()[0])
        model.load_state_dict({name: value.clone() for name, value in state.items()}, assign=assign)
        assert_arrived(model, f"load_state_dict, assign={assign}")
    model = fully_shard(two_models()[0])
    set_model_state_dict(
        model,
        whole if dist.get_rank() == 0 else {},
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
    assert_arrived(model, "from rank 0")
    dcp.save(get_model_state_dict(source), checkpoint_id=folder)
    model = fully_shard(two_models()[0])
    state = get_model_state_dict(model)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state)
    assert_arrived(model, "checkpoint")
    buffer = io.BytesIO()
    torch.save(source.state_dict(), buffer)
    buffer.seek(0)
    model = fully_shard(two_models()[0])
    model.load_state_dict(torch.load(buffer, weights_only=False))
    assert_arrived(model, "torch.save")


def copy_of(plain: nn.Sequential) -> nn.Sequential:
    twin = two_models()[1]
    with torch.no_grad():
        for mine, theirs in zip(twin.parameters(), plain.parameters(), strict=True):
            mine.copy_(theirs)
    return twin


def is_sent_to_other_ranks() -> None:
    """Values that differ between ranks, with the scales that they are read by; before `fully_shard`, and afterwards."""
    plain = Model()
    model = Model()
    torch.manual_seed(100 + dist.get_rank())
    other = packed(torch.randn(8, WIDTH))
    if dist.get_rank():
        model.packed = other
        model.packed.state = SimpleNamespace(inner=SimpleNamespace(scale=torch.ones(2)))  # type: ignore[attr-defined]
        model.tail.weight.data.mul_(2)
    else:
        model.packed.state = SimpleNamespace(inner=SimpleNamespace(scale=torch.zeros(2)))  # type: ignore[attr-defined]
    sync_module_states(model)
    assert not model.packed.state.inner.scale.any()  # type: ignore[attr-defined]
    assert_same(model.packed.values(), plain.packed.values(), 0, 0, "values")
    fully_shard(model)
    train_beside(model, plain, batch)
    if dist.get_rank():
        model.packed.largest.zero_()
    sync_module_states(model)
    assert_same(model.packed.largest, plain.packed.largest, 0, 0, "scales")


def is_built_on_meta() -> None:
    with torch.device("meta"):
        model: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=DTYPE), nn.Linear(WIDTH, WIDTH, dtype=DTYPE))
        for layer in model:
            layer.weight = Tagged(layer.weight.data)
            layer.weight.tag = "weight"
    fully_shard(model)
    model.to_empty(device="cpu")
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=DTYPE), nn.Linear(WIDTH, WIDTH, dtype=DTYPE))
    with torch.no_grad():
        for param, source in zip(model.parameters(), plain.parameters(), strict=True):
            dist.broadcast(source.data, 0)
            param.copy_(distribute_tensor(source.detach(), param.device_mesh, param.placements))
    train_beside(model, plain, batch)
    model.unshard()
    assert all(type(layer.weight) is Tagged and layer.weight.tag == "weight" for layer in model)
    model.reshard()
    model.to(torch.float32)
    assert model(batch(0).float()).dtype == torch.float32
    assert model[0].weight.tag == "weight"


def is_replaced() -> None:
    """By a parameter of another class, and by a plain one, which leaves the class."""
    model, plain = Model(), Model()
    fully_shard(model)
    for each in (model, plain):
        new: Any = Scaled(torch.full((WIDTH, ROWS), 0.1, dtype=DTYPE), 6.0)
        if each is model:
            held: Any = model.tail.weight
            new = nn.Parameter(distribute_tensor(new.data, held.device_mesh, held.placements))
            new.scale = 6.0
        each.tail.weight = new
    train_beside(model, plain, batch)


class Branch(nn.Module):
    """The second part runs for the rows of the first rank only."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = Model(), Model()

    def forward(self, x: Tensor) -> Tensor:
        y = self.always(x)
        if len(x) == 12:  # the whole batch: not sharded
            return torch.cat([self.sometimes(y[:6]), y[6:]])
        return self.sometimes(y) if dist.get_rank() == 0 else y


def on_one_of_two_ranks() -> None:
    """Conditional modules: ranks that leave a module out send shards for those that do not."""
    model, plain = Branch(), Branch()
    fully_shard(model.sometimes, conditional=True)
    fully_shard(model)
    train_beside(model, plain, batch)


class Kinds(nn.Module):
    """Parameters of modules that keep them elsewhere, too, and tied ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.rnn = nn.LSTM(WIDTH, WIDTH, dtype=DTYPE)
        for name, param in [*self.rnn.named_parameters()]:
            setattr(self.rnn, name, Tagged(param.data))
        weights = torch.randn(3, WIDTH, WIDTH, dtype=DTYPE).unbind()
        self.several = nn.ParameterList([Tagged(weights[0].clone()), Scaled(weights[1].clone(), 2.0)])
        self.named = nn.ParameterDict({"watched": Watched(weights[2].clone())})
        self.named["watched"].factor = 0.3
        self.first, self.last = (nn.Linear(WIDTH, WIDTH, bias=False, dtype=DTYPE) for _ in range(2))
        self.first.weight = self.last.weight = Tagged(self.first.weight.data)

    def forward(self, x: Tensor) -> Tensor:
        assert type(self.rnn.weight_ih_l0) is type(self.last.weight) is Tagged
        y, _ = self.rnn(x[None])
        first, second = self.several
        y = torch.tanh(self.first(y[0])) @ first @ second * second.scale
        return self.last(torch.tanh(y)) + nn.functional.linear(x, self.named["watched"])


def in_kinds_of_modules() -> None:
    """With clipping and flat steps, too."""
    model, plain = Kinds(), Kinds()
    fully_shard(model)
    train_beside(model, plain, batch)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, plain)]
    flatten_optimizer(optimizers[0])
    mean_loss(model(batch(9).chunk(dist.get_world_size())[dist.get_rank()])).backward()
    mean_loss(plain(batch(9))).backward()
    clip_grad_norm_(model.parameters(), 0.1)
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    for optimizer in optimizers:
        optimizer.step()
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_same(param, expected, 1e-6, 1e-7, name)
    report = compare(Kinds(), fully_shard(Kinds()), batch(0))
    assert report, report


def shares_memory_with_an_attribute() -> None:
    """The advice, followed: copied where it is trained, ignored where it is frozen."""
    model, plain = two_models()
    for each in model:
        each.tail.weight.master = each.tail.weight.data  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"tail\.weight\.master, an attribute of a Scaled, and .* Copy it"):
        fully_shard(model)
    for each in model:
        each.tail.weight.master = each.tail.weight.data.clone()  # type: ignore[union-attr]
        each.packed.whole = each.packed.data  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"packed\.whole, an attribute of a Packed.* ignored_params"):
        fully_shard(model)
    fully_shard(model, ignored_params={each.packed for each in model})  # type: ignore[misc]
    train_beside(model, plain, batch)


def hybrid() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def replicates() -> None:
    model, plain = two_models()
    replicate(model)
    train_beside(model, plain, batch)


def along_columns() -> None:
    model, plain = two_models()
    fully_shard(model, shard_placement_fn=lambda p: Shard(p.dim() - 1) if p.dim() else None)
    train_beside(model, plain, batch)


def dispatches() -> None:
    model, plain = (nn.Linear(WIDTH, WIDTH, dtype=DTYPE) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    for each in (model, plain):
        dist.broadcast(each.weight.data, 0)
        dist.broadcast(each.bias.data, 0)
        each.weight = Dispatching(each.weight.data)
    fully_shard(model)
    model.unshard()  # type: ignore[operator]
    assert type(model.weight) is Dispatching
    model.reshard()  # type: ignore[operator]
    train_beside(model, plain, batch)


def no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trains()


TRAINED = [
    ("trains", no_warning),
    ("kept after forward", partial(trains, reshard_after_forward=False)),
    ("checkpointed", partial(trains, checkpointed=True, reshard_after_forward=True)),
]


def test_on_two_ranks(tmp_path: Any) -> None:
    checks = [
        *TRAINED,
        ("cast", trains_in_bf16),
        ("may be packed", says_that_a_cast_may_destroy_bits),
        ("copies", is_copied),
        ("saved and loaded", partial(is_saved_and_loaded, tmp_path)),
        ("sent", is_sent_to_other_ranks),
        ("meta", is_built_on_meta),
        ("replaced", is_replaced),
        ("kinds of modules", in_kinds_of_modules),
        ("conditional", on_one_of_two_ranks),
        ("shared memory", shares_memory_with_an_attribute),
        ("replicates", replicates),
        ("columns", along_columns),
        ("own dispatch", dispatches),
    ]
    run_checks(2, checks)


def test_on_one_and_on_three_ranks() -> None:
    run_checks(1, [*TRAINED, ("copies", is_copied)])
    run_checks(3, TRAINED)


def test_on_four_ranks() -> None:
    checks = [("replicas", partial(trains, hybrid)), ("a part stays", partial(trains, reshard_after_forward=2))]
    run_checks(4, checks)
