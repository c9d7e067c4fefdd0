"""Tests the table of error messages in examples/README.md: a program with each mistake gets the message.

The first cell of a row is a text that a reader searches for. The row's program must raise on every rank, with that text
in the error. A row without a program, and a program without a row, fail.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import StateDictType
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.two_tensor import TwoTensor

from documents import ROOT, table_rows
from fsdp2 import MixedPrecisionPolicy, fully_shard
from helpers import run_checks
from situations import KernelSGD

ROWS = [cells[0].strip("`") for cells in table_rows(ROOT / "examples" / "README.md")["By error message"]]
FROM_TORCH = (
    "module 'torch._C' has no attribute '_cuda_setDevice'",
    "one of the variables needed for gradient computation has been modified by an inplace operation",
    "Connection closed by peer",
)
Program = Callable[[], Any]
PROGRAMS: dict[str, Program] = {}


def says(text: str) -> Callable[[Program], Program]:
    def add(program: Program) -> Program:
        PROGRAMS[text] = program
        return program

    return add


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(5, 8), nn.Linear(8, 4)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.encode(x)))

    def encode(self, x: Tensor) -> Tensor:
        return self.stem(x)


def build(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def shard(model: Any, **options: Any) -> Any:
    fully_shard(model.block, **options)
    return fully_shard(model, **options)


def backward(model: Any) -> None:
    model(torch.ones(2, 5)).sum().backward()


@says("ranks had different values of it when fully_shard was called")
def other_weights() -> None:
    backward(shard(build(seed=dist.get_rank())))


@says("the optimizer was built before fully_shard")
def early_optimizer() -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    backward(shard(model))
    optimizer.step()


@says("Call set_requires_gradient_sync(True) before the last backward")
def unsynchronized() -> None:
    model = shard(build())
    model.set_requires_gradient_sync(False)
    backward(model)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


@says("computes with parameters that are sharded")
def method() -> None:
    model = shard(build())
    model.encode(torch.ones(2, 5))


@says("was called while its parameters are sharded")
def inner_module() -> None:
    shard(build()).block[0](torch.ones(2, 8))


@says("the unsharded parameter was read after it was freed")
def kept_weight() -> None:
    model, kept = shard(build()), []
    model.block[0].register_forward_hook(lambda module, *_: kept.append(module.weight))
    with torch.no_grad():
        model(torch.ones(2, 5))
    kept[0].norm()


@says("On every rank, save inside")
def saved_by_one_rank() -> None:
    class Prompts(Net):
        def prompts_to_save(self) -> Tensor:
            return self.stem(torch.ones(2, 5)).detach()

    shard(Prompts()).prompts_to_save()


@says("Replace modules before fully_shard")
def swapped() -> None:
    class Faster(nn.Module):
        def __init__(self, old: Any) -> None:
            super().__init__()
            self.weight, self.bias = old.weight, old.bias

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.weight, self.bias)

    model = shard(build())
    model.stem = Faster(model.stem)
    backward(model)


@says("takes no DTensors")
def kernel_of_an_optimizer() -> None:
    model = shard(build())
    optimizer = KernelSGD(model.parameters())
    backward(model)
    optimizer.step()


@says("expected a FullyShardedDataParallel, got")
def of_fsdp1() -> None:
    FSDP1.set_state_dict_type(shard(build()), StateDictType.FULL_STATE_DICT)


@says("got mixed torch.Tensor and DTensor")
def functional() -> None:
    nn.functional.linear(torch.ones(2, 8), shard(build()).head.weight)


@says("a plain tensor can't be copied into it")
def full_state_dict() -> None:
    shard(build()).load_state_dict(build().state_dict())


@says("of a plain tensor of shape")
def plain_number() -> None:
    model, total = shard(build()), torch.zeros(())
    backward(model)
    total += model.head.weight.grad.norm()


@says("data_ptr() was asked of a DTensor")
def address() -> None:
    shard(build()).head.weight.untyped_storage().data_ptr()


@says("a loss is made of its .grad")
def penalty_on_gradients() -> None:
    model = shard(build())
    model(torch.ones(2, 5)).sum().backward(create_graph=True)
    model.head.weight.grad.full_tensor().square().sum().backward()


@says("to_empty gave it memory")
def empty() -> None:
    with torch.device("meta"):
        model = Net()
        model.register_buffer("angles", torch.ones(3), persistent=False)
    shard(model).to_empty(device="cpu")
    for param in model.parameters():
        nn.init.ones_(param)
    backward(model)


@says("expected parameters on cpu, got")
def on_meta() -> None:
    with torch.device("meta"):
        model = Net()
    backward(shard(model))


@says("is the same parameter as")
def tied() -> None:
    model = build()
    model.block[0].weight = model.head.weight
    shard(model)


@says("no fully_shard call manages it")
def late_adapter() -> None:
    model = shard(build())
    model.adapter = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        model.adapter(model(torch.full((2, 5), float(dist.get_rank())))).sum().backward()
        optimizer.step()


@says("ranks register their modules in another order")
def another_order() -> None:
    torch.manual_seed(0)
    names = ["a", "b"] if dist.get_rank() == 0 else ["b", "a"]
    heads = nn.ModuleDict({name: nn.Linear(5, 2) for name in names})
    heads.forward = lambda x: heads["a"](x)  # type: ignore[method-assign]
    backward(fully_shard(heads))


@says("expected the same on all ranks, got")
def another_shape() -> None:
    model = build()
    model.head = nn.Linear(8, 4 + dist.get_rank())
    backward(shard(model))


@says("requires_grad differs between ranks")
def frozen_on_one_rank() -> None:
    model = shard(build())
    model.block.requires_grad_(dist.get_rank() == 0)
    backward(model)


def with_buffer(value: float) -> Any:
    model = build()
    model.register_buffer("scale", torch.tensor([value]))
    return shard(model)


@says("a buffer that ranks have built, or loaded, differently")
def own_buffer() -> None:
    backward(with_buffer(float(dist.get_rank())))


@says("a buffer that was the same on all ranks, and is not any more")
def buffer_of_own_rows() -> None:
    model = with_buffer(0.0)
    for _ in range(2):
        backward(model)
        model.scale += dist.get_rank()


def step_alone(model: Any, write: Callable[[], object]) -> None:
    for _ in range(2):
        backward(model)
        if dist.get_rank() == 0:
            write()
        model.zero_grad()


@says("this optimizer has stepped")
def step_left_out() -> None:
    model = shard(build())
    step_alone(model, torch.optim.SGD(model.parameters(), lr=0.1).step)


@says("has written to this frozen parameter")
def frozen_parameter_written() -> None:
    model = build()
    model.stem.requires_grad_(False)
    shard(model)
    step_alone(model, lambda: torch.no_grad()(model.stem.weight.zero_)())


@says("FullyShardedDataParallel wraps the module that has it")
def fsdp1_inside() -> None:
    model = build()
    model.head = FSDP1(model.head, device_id=torch.device("cpu"))  # type: ignore[assignment]
    shard(model)


@says("ranks are out of step")
def other_modules() -> None:
    model = shard(build())
    backward(model)
    with torch.no_grad():
        if dist.get_rank() == 0:
            model.block(torch.ones(2, 8))
        else:
            model(torch.ones(2, 5))


@says("modified in place during forward")
def write_in_forward() -> None:
    model = shard(build())

    def write(module: Any, args: Any) -> None:
        with torch.no_grad():
            module.weight.mul_(2)

    model.stem.register_forward_pre_hook(write)
    backward(model)


@says("between unshard() and reshard()")
def write_unsharded() -> None:
    model = shard(build())
    model.unshard()
    with torch.no_grad():
        model.head.weight.zero_()
    model.reshard()


class Holder:
    def __init__(self, x: Tensor) -> None:
        self.x = x


class Unpacks(Net):
    def forward(self, holder: Any) -> Tensor:
        return super().forward(holder.x)


@says("expected inputs of torch.bfloat16")
def object_of_inputs() -> None:
    torch.manual_seed(0)
    shard(Unpacks(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))(Holder(torch.ones(2, 5)))


@says("does not say how these are gathered")
def wrapper() -> None:
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(TwoTensor(torch.ones(4, 4), torch.ones(4, 4)))
    fully_shard(model)(torch.ones(2, 4))


class Packed(nn.Parameter):
    """A class whose attributes say how its values are to be read."""


def packed() -> Any:
    model: Any = nn.Linear(4, 4)
    model.weight = Packed(torch.ones(4, 4), requires_grad=False)
    model.weight.scale = 2.0
    return model


@says("A cast destroys values that are packed")
def cast_of_packed_values() -> None:
    fully_shard(packed(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


@says("share memory, and would not after sharding")
def attribute_over_a_parameter() -> None:
    model = packed()
    model.weight.alias = model.weight.data
    fully_shard(model)


@says("has written in place into")
def write_to_a_leaf() -> None:
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(5, 5))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16))(torch.ones(2, 5).requires_grad_())


@says("expected a divisor of")
def no_divisor() -> None:
    shard(build(), reshard_after_forward=3)


@says("Remove DistributedDataParallel")
def ddp() -> None:
    DistributedDataParallel(shard(build()))


@says("optimizers have stepped with other settings")
def other_rates() -> None:
    model = shard(build())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + dist.get_rank()))
    for _ in range(4):
        backward(model)
        optimizer.step()


@says("are divided in several ways")
def other_divisors() -> None:
    model = shard(build())
    model.block.set_gradient_divide_factor(4.0)
    backward(model)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@says("has no forward, so its parameters could never be gathered")
def container() -> None:
    fully_shard(nn.ModuleList([nn.Linear(2, 2)]))


@says("is not part of")
def outside() -> None:
    shard(build(), mesh=DeviceMesh("cpu", [1 - dist.get_rank()]))


@says("is in a TorchScript module")
def scripted() -> None:
    model = build()
    model.head = torch.jit.script(model.head)
    shard(model)


@says("Remove FullyShardedDataParallel")
def fsdp1() -> None:
    FSDP1(shard(build()), device_id=torch.device("cpu"))


@says("FakeTensorMode has no values to gather")
def fake() -> None:
    model = shard(build())
    with FakeTensorMode(allow_non_fake_inputs=True):
        backward(model)


@says("compiled autograd runs this backward")
def backward_compiled() -> None:
    loss = shard(build())(torch.ones(2, 5)).sum()
    with compiled_autograd._enable(lambda graph: graph):
        loss.backward()


@says("expected ranks in ascending order")
def ranks_backwards() -> None:
    shard(build(), mesh=DeviceMesh("cpu", [1, 0]))


def test_every_message_has_a_program() -> None:
    assert {*ROWS} == PROGRAMS.keys() | {*FROM_TORCH}


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:FSDP.state_dict_type:FutureWarning")
def test_programs_get_the_messages() -> None:
    def check(text: str, program: Program) -> Callable[[], None]:
        def run() -> None:
            with pytest.raises(Exception, match=re.escape(text)):
                program()

        return run

    run_checks(2, [(program.__name__, check(text, program)) for text, program in PROGRAMS.items()])
