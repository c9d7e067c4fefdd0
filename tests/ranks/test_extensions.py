"""Tests parameters that define their own gather: a cast for the collective, quantised weights, methods set by hand."""

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from fsdp2 import MixedPrecisionPolicy, fully_shard
from fsdp2.engine.state import groups_of
from helpers import assert_same, full, run_checks, world_sizes
from models import mean_loss
from scenarios import train_beside

aten = torch.ops.aten
WIDTH = 8
CALLS: list[tuple[Any, ...]] = []
"""The arguments of each `fsdp_pre_all_gather`, for a check that clears it."""


class Wrapper(Tensor):
    """A subclass with one or two inner tensors, to each of which most operations are applied alike."""

    inner: tuple[str, ...] = ("data_",)

    @staticmethod
    def __new__(cls, *parts: Tensor) -> Any:
        first = parts[0]
        return Tensor._make_wrapper_subclass(
            cls, first.shape, strides=first.stride(), dtype=torch.float32, device=first.device
        )

    def __init__(self, *parts: Tensor) -> None:
        for name, part in zip(self.inner, parts, strict=True):
            setattr(self, name, part)

    def __tensor_flatten__(self) -> Any:
        return list(self.inner), None

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, Tensor], *_: Any) -> Any:
        return cls(*parts.values())

    def __repr__(self, **_: Any) -> str:
        return f"{type(self).__name__}({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def of_part(i: int, values: Any) -> Any:
            return tree_map_only(cls, lambda value: getattr(value, cls.inner[i]), values)

        results = [func(*of_part(i, args), **of_part(i, kwargs or {})) for i in range(len(cls.inner))]
        if func is aten.copy_.default:
            return args[0]
        if isinstance(results[0], (list, tuple)):
            return [cls(*parts) for parts in zip(*results, strict=True)]
        return cls(*results) if isinstance(results[0], Tensor) else results[0]


class InBF16(Wrapper):
    """Stored in fp32, gathered in bf16. Uneven shards are padded here."""

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        CALLS.append((mesh, outer_size, outer_stride, module, mp_policy))
        rows = -(-outer_size[0] // mesh.size())
        padded = self.data_.new_zeros(rows, *self.data_.shape[1:], dtype=torch.bfloat16)
        padded[: self.data_.shape[0]].copy_(self.data_)
        return (padded,), outer_size[0]

    def fsdp_post_all_gather(self, outputs: Any, rows: int, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        value = outputs[0][:rows].to(param_dtype)
        if out is not None:
            out.copy_(value)
            return None
        return value, (value,)


class Unpadded(InBF16):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        return (self.data_.bfloat16(),), self.data_.shape[0] * mesh.size()


class Int8(Wrapper):
    """Quantised: bytes, and a scale for each row; what is gathered stays quantised until it is used."""

    inner = ("values_", "scales_")

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.values_, self.scales_), None

    def fsdp_post_all_gather(self, outputs: Any, _: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        if out is not None:
            assert out.values_.data_ptr() == outputs[0].data_ptr(), "the outputs of each gather are the same tensors"
            return None
        return Int8(*outputs), outputs

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            x, weight, *bias = args
            return func(x, weight.values_.float() * weight.scales_, *bias, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})


def quantised(values: Tensor) -> Int8:
    scales = values.abs().amax(1, keepdim=True) / 127
    return Int8((values / scales).round().to(torch.int8), scales)


class Rounded(torch.autograd.Function):
    """bf16 and back; its gradient passes as it is."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.bfloat16().to(value.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient


class Model(nn.Module):
    """`wrap` makes the middle weight of each block an self_gathering one; without, it is rounded as the gather does."""

    def __init__(self, rows: int, wrap: Callable[[Tensor], Tensor] | None, checkpointed: bool = False) -> None:
        super().__init__()
        self.wrap, self.checkpointed = wrap, checkpointed
        torch.manual_seed(3)
        self.ins = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.mids = nn.ModuleList(nn.Linear(WIDTH, rows) for _ in range(2))
        self.outs = nn.ModuleList(nn.Linear(rows, WIDTH) for _ in range(2))
        if wrap is not None:
            for mid in self.mids:
                wrapped = wrap(mid.weight.detach())
                mid.weight = wrapped if isinstance(wrapped, nn.Parameter) else nn.Parameter(wrapped)

    def block(self, i: int, x: Tensor) -> Tensor:
        mid: Any = self.mids[i]
        x = torch.tanh(self.ins[i](x))
        x = mid(x) if self.wrap is not None else nn.functional.linear(x, Rounded.apply(mid.weight), mid.bias)
        return self.outs[i](torch.tanh(x))

    def forward(self, x: Tensor) -> Tensor:
        for i in range(2):
            x = checkpoint(self.block, i, x, use_reentrant=False) if self.checkpointed else self.block(i, x)
        return x


def batch(seed: int) -> Tensor:
    return torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(seed))


def value_of(param: Tensor) -> Tensor:
    """A parameter whose local tensor is a Wrapper, as a plain tensor, padded shards cut."""
    local: Any = param._local_tensor  # type: ignore[attr-defined]
    plain = DTensor.from_local(
        local.data_ if isinstance(local, Wrapper) else local.as_subclass(Tensor),
        param.device_mesh,  # type: ignore[attr-defined]
        param.placements,  # type: ignore[attr-defined]
        shape=param.shape,
        stride=param.stride(),
    )
    return full(plain)


def trains(
    rows: int,
    checkpointed: bool = False,
    mesh: Callable[[], Any] = lambda: None,
    wrap: Callable[[Tensor], Tensor] = InBF16,
    then: Callable[[Model], None] = lambda model: None,
    **options: Any,
) -> None:
    """SGD over shards of a subclass, three steps of two micro-batches each. `then` is called after `fully_shard`."""
    plain = Model(rows, None)
    model = Model(rows, wrap, checkpointed)
    fully_shard(model.mids[1], mesh=mesh(), **options)  # of self_gathering and plain parameters, by itself
    fully_shard(model, mesh=mesh(), **options)
    then(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, plain)]
    size, rank = dist.get_world_size(), dist.get_rank()
    for step in range(3):
        for last in (False, True):
            model.set_requires_gradient_sync(last)  # type: ignore[attr-defined]
            whole = batch(2 * step + last)
            mean_loss(model(whole.chunk(size)[rank])).backward()
            mean_loss(plain(whole)).backward()
        for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert_same(full(param.grad), expected.grad, 1e-4, 1e-5, f"step {step}, {name}.grad")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        value = value_of(param) if name.startswith("mids") and "weight" in name else full(param)
        assert_same(value, expected, 1e-4, 1e-5, name)


def replicas() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def what_it_is_told() -> None:
    CALLS.clear()
    policy = MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=torch.float64)
    model = Model(WIDTH, InBF16)
    fully_shard(model, mesh=replicas(), mp_policy=policy)
    output = model(batch(0))
    assert output.dtype == torch.float64
    assert len(CALLS) == 2
    for (mesh, size, stride, module, given), mid in zip(CALLS, model.mids, strict=True):
        assert (mesh.ndim, mesh.size()) == (1, 2), "the mesh that shards, of one axis"
        assert (size, stride) == (torch.Size((WIDTH, WIDTH)), (WIDTH, 1))
        assert (module, given) == (mid, policy)


def memory_comes_and_goes() -> None:
    model = Model(WIDTH, InBF16)
    for part in (*model.ins, *model.mids, *model.outs):
        fully_shard(part)
    fully_shard(model)
    group = groups_of(model.mids[0])[0]
    mean_loss(model(batch(0))).backward()
    held = [
        storage.nbytes()
        for extension in group.parameters.self_gather.members
        for storage, _ in extension._storages.values()
    ]
    assert held == [0, 0], "the gathered bytes, and the cast made of them"
    model.mids[0].unshard()  # type: ignore[operator]
    assert group.nbytes == 2 * WIDTH * WIDTH + group.parameters.buffers.layout.unsharded_nbytes  # type: ignore[union-attr]
    assert_same(model.mids[0].weight, value_of_group(group), 0, 0, "the unsharded parameter")
    model.mids[0].reshard()  # type: ignore[operator]


def value_of_group(group: Any) -> Tensor:
    return value_of(group.params[-1].sharded).bfloat16().float()


def quantised_and_frozen(checkpointed: bool) -> None:
    """What QLoRA does: quantised weights that are not trained beside plain ones that are."""
    model, plain = Model(WIDTH, quantised, checkpointed), Model(WIDTH, lambda weight: weight)
    for mid, twin in zip(model.mids, plain.mids, strict=True):
        mid.weight.requires_grad_(False)
        value = mid.weight.detach()
        twin.weight = nn.Parameter(value.values_.float() * value.scales_, requires_grad=False)
    for i in range(2):
        fully_shard([model.ins[i], model.mids[i]])
    fully_shard(model)
    train_beside_but_frozen(model, plain)


def train_beside_but_frozen(model: Any, plain: nn.Module) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    optimizers = [torch.optim.AdamW(p for p in each.parameters() if p.requires_grad) for each in (model, plain)]
    for step in range(3):
        whole = batch(step)
        mean_loss(model(whole.chunk(size)[rank])).backward()
        mean_loss(plain(whole)).backward()
        for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert_same(param.grad, expected.grad, 1e-4, 1e-5, f"step {step}, {name}.grad")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def set_by_hand_after_to_empty() -> None:
    """Methods set on local tensors, which `to_empty` has made anew, of a model that was built on meta."""
    plain = Model(WIDTH, None)
    with torch.device("meta"):
        model = Model(WIDTH, lambda weight: weight)
    fully_shard(model)
    model.to_empty(device="cpu")

    def pre(local: Tensor, mesh: Any) -> Any:
        return (local.bfloat16(),), local.shape[0] * mesh.size()

    with torch.no_grad():
        for param, source in zip(model.parameters(), plain.parameters(), strict=True):
            param.copy_(
                torch.distributed.tensor.distribute_tensor(source.detach(), param.device_mesh, param.placements)
            )  # type: ignore[attr-defined]
    for mid in model.mids:
        local: Any = mid.weight._local_tensor
        local.fsdp_pre_all_gather = MethodType(pre, local)
        local.fsdp_post_all_gather = MethodType(InBF16.fsdp_post_all_gather, local)
    train_beside(model, plain, batch)


def set_by_hand_while_gradients_wait() -> None:
    """They are known by the places of their parameters, which that would change."""
    model = Model(WIDTH, None)
    fully_shard(model)
    model.set_requires_gradient_sync(False)
    mean_loss(model(batch(0))).backward()
    weight: Any = model.mids[0].weight
    local = weight._local_tensor = weight._local_tensor.clone()
    local.fsdp_pre_all_gather = MethodType(lambda local, mesh: ((local.bfloat16(),), WIDTH), local)
    local.fsdp_post_all_gather = MethodType(InBF16.fsdp_post_all_gather, local)
    with pytest.raises(RuntimeError, match=r"^mids\.0\.weight: how it is gathered .* can't change while gradients"):
        model(batch(1))
    model.zero_grad()
    model.set_requires_gradient_sync(True)
    mean_loss(model(batch(1))).backward()
    assert all(type(param.grad) is type(param) for param in model.parameters() if param.requires_grad)


def ranks_must_agree() -> None:
    """Of 5 rows, the second rank holds 2; it raises there and here, and what pads itself goes on."""
    model = Model(5, Unpadded)
    fully_shard(model)
    with pytest.raises(
        ValueError, match=r"mids.0.weight, mids.1.weight: fsdp_pre_all_gather returned tensors of other"
    ):
        model(batch(0))
    dist.barrier()
    even = Model(WIDTH, Unpadded)
    fully_shard(even)
    assert_same(even(batch(0)), Model(WIDTH, None)(batch(0)), 1e-6, 1e-6, "even rows need no padding")


def wrong_signature() -> None:
    class Wrong(InBF16):
        def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any) -> Any:  # type: ignore[override]
            return (), None

    with pytest.raises(ValueError, match=r"mids.0.weight: expected fsdp_pre_all_gather\(mesh\) or"):
        fully_shard(Model(WIDTH, Wrong))


def other_shape() -> None:
    class Flat(Unpadded):
        def fsdp_post_all_gather(self, outputs: Any, *_: Any, out: Any = None) -> Any:
            return outputs[0].view(-1), outputs

    model = fully_shard(Model(WIDTH, Flat))
    with pytest.raises(
        ValueError, match=r"mids.0.weight: expected fsdp_post_all_gather to return .*\(8, 8\), got \(64,\)"
    ):
        model(batch(0))


# ---- methods that are set after fully_shard


class Late(Wrapper):
    """Says nothing of how it is gathered, until a test gives it the methods."""


class LateOwn(Tensor):
    """The same, with values in memory of its own."""


class LateParameter(nn.Parameter):
    """The same, a subclass of nn.Parameter."""


def pre_of_plain(local: Any, mesh: Any, outer_size: Any, stride: Any, module: Any, mp_policy: Any) -> Any:
    values = local.data_ if isinstance(local, Wrapper) else local.as_subclass(Tensor)
    rows = -(-outer_size[0] // mesh.size())
    padded = values.new_zeros(rows, *values.shape[1:], dtype=torch.bfloat16)
    padded[: values.shape[0]].copy_(values)
    return (padded,), outer_size[0]


class OwnInBF16(nn.Parameter):
    """Has values in memory of its own, and says from the beginning how it is gathered."""

    fsdp_pre_all_gather, fsdp_post_all_gather = pre_of_plain, InBF16.fsdp_post_all_gather


def on_class(cls: Any) -> Callable[[Model], None]:
    def then(model: Model) -> None:
        cls.fsdp_pre_all_gather, cls.fsdp_post_all_gather = pre_of_plain, InBF16.fsdp_post_all_gather

    return then


def on_shards(model: Model) -> None:
    for mid in model.mids:
        local: Any = mid.weight._local_tensor
        local.fsdp_pre_all_gather = MethodType(pre_of_plain, local)
        local.fsdp_post_all_gather = MethodType(InBF16.fsdp_post_all_gather, local)


def set_later(then: Callable[[Model], None], wrap: Any, **options: Any) -> None:
    try:
        trains(5, wrap=wrap, then=then, **options)
    finally:
        for cls in (Late, LateOwn, LateParameter):
            for name in ("fsdp_pre_all_gather", "fsdp_post_all_gather"):
                if name in vars(cls):
                    delattr(cls, name)


def set_on_shards_after_to_empty() -> None:
    """Of wrappers that were built on meta."""
    plain = Model(WIDTH, None)
    with torch.device("meta"):
        model = Model(WIDTH, Late)
    fully_shard(model)
    model.to_empty(device="cpu")
    for param, source in zip(model.parameters(), plain.parameters(), strict=True):
        whole = torch.distributed.tensor.distribute_tensor(source.detach(), param.device_mesh, param.placements)  # type: ignore[attr-defined]
        local: Any = param._local_tensor  # type: ignore[attr-defined]
        (local.data_ if isinstance(local, Late) else local).copy_(whole.to_local())
    on_shards(model)
    assert_same(model(batch(0)), plain(batch(0)), 1e-5, 1e-6, "output")


def never_set() -> None:
    """An error on every rank, in the first forward and wherever the group is gathered; then the advice, followed."""
    model, plain = Model(WIDTH, Late), Model(WIDTH, None)
    fully_shard(model)
    for use in (lambda: model(batch(0)), model.unshard, lambda: model(batch(0))):
        with pytest.raises(
            NotImplementedError,
            match=r"^mids\.0\.weight, of shape .* its values lie in other tensors, and Late does not say how these are "
            r"gathered\. Give the class fsdp_pre_all_gather and fsdp_post_all_gather, before the first forward at the "
            r"latest\.",
        ):
            use()
    on_class(Late)(model)
    assert_same(model(batch(0)), plain(batch(0)), 1e-5, 1e-6, "output")
    del Late.fsdp_pre_all_gather, Late.fsdp_post_all_gather  # type: ignore[attr-defined]
    frozen = Model(WIDTH, Late)
    for mid in frozen.mids:
        mid.weight.requires_grad_(False)
    fully_shard(frozen)
    with pytest.raises(NotImplementedError, match=r"or put the parameter into ignored_params of fully_shard"):
        frozen(batch(0))
    frozen = Model(WIDTH, quantised)
    for mid in frozen.mids:
        mid.weight.requires_grad_(False)
    expected = frozen(batch(0))
    fully_shard(frozen, ignored_params={mid.weight for mid in frozen.mids})
    assert_same(frozen(batch(0)), expected, 1e-6, 1e-6, "ignored")


def can_not_be_cut() -> None:
    class Rigid(Late):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is aten.new_zeros.default:
                raise RuntimeError("has no zeros")
            return super().__torch_dispatch__(func, types, args, kwargs)

    model = Model(WIDTH, Rigid)
    with pytest.raises(
        NotImplementedError, match=r"^mids\.0\.weight.* Give the class .* Cutting it fails: has no zeros"
    ):
        fully_shard(model)
    assert not isinstance(model.ins[0].weight, DTensor), "nothing has changed"


LATE = [
    ("on the class", partial(set_later, on_class(Late), Late)),
    ("on the class of values of its own", partial(set_later, on_class(LateOwn), lambda t: t.as_subclass(LateOwn))),
    ("on a class of parameters", partial(set_later, on_class(LateParameter), LateParameter)),
    ("on shards", partial(set_later, on_shards, Late)),
    ("on shards of values of their own", partial(set_later, on_shards, lambda t: t.as_subclass(LateOwn))),
    ("on shards, checkpointed", partial(set_later, on_shards, Late, checkpointed=True, reshard_after_forward=True)),
    ("a class of parameters", partial(trains, 5, wrap=OwnInBF16)),
]

TRAINED = [
    ("even", partial(trains, WIDTH)),
    ("uneven", partial(trains, 5)),
    ("kept after forward", partial(trains, WIDTH, reshard_after_forward=False)),
    ("checkpointed", partial(trains, 5, checkpointed=True, reshard_after_forward=True)),
]


def test_on_two_ranks() -> None:
    checks = [
        *TRAINED,
        ("memory", memory_comes_and_goes),
        ("quantised", partial(quantised_and_frozen, checkpointed=False)),
        ("quantised, checkpointed", partial(quantised_and_frozen, checkpointed=True)),
        ("set by hand", set_by_hand_after_to_empty),
        ("set by hand while gradients wait", set_by_hand_while_gradients_wait),
        *LATE,
        ("on shards after to_empty", set_on_shards_after_to_empty),
        ("never set", never_set),
        ("can't be cut", can_not_be_cut),
        ("checks of ranks", ranks_must_agree),
        ("wrong signature", wrong_signature),
        ("other shape", other_shape),
    ]
    run_checks(2, checks)


@pytest.mark.parametrize("world_size", world_sizes(1, nightly=[3]))
def test_on_other_numbers_of_ranks(world_size: int) -> None:
    run_checks(world_size, TRAINED + LATE)


def test_on_four_ranks_that_replicate_and_shard() -> None:
    run_checks(
        4,
        [
            ("trains", partial(trains, 5, mesh=replicas)),
            ("later", partial(set_later, on_shards, Late, mesh=replicas)),
            ("what it is told", what_it_is_told),
        ],
    )
