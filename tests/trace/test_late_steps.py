"""Tests steps that overlap the next forward (`flatten_optimizer(..., overlap_with_forward=True)`): the order of streams
by vector clocks, and bits, beside the same steps in the usual order.
"""

import copy
import gc
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from simulated_world import count_host_waits, simulated_world
from torch import Tensor, nn
from vector_clocks import Simulation

from fsdp2 import (
    MixedPrecisionPolicy,
    clip_grad_norm_,
    flatten_optimizer,
    full_params,
    fully_shard,
    vocab_parallel_embedding,
)
from fsdp2.collectives import coalesced
from fsdp2.features.late_steps import LateStep, LateSteps
from fsdp2.optim import steps
from helpers import NIGHTLY

RANKS, DIM = 4, 16
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.fixture(autouse=True)
def _as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters that are gathered in place, and spans that are not packed, as on the CPU small ones are."""
    monkeypatch.setattr(coalesced.CoalescedComm, "direct_min_bytes", 16)
    monkeypatch.setattr(steps, "SMALL_NUMEL", 0)


def build(**options: Any) -> Any:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(DIM, 2 * DIM + 1), nn.Tanh(), nn.Linear(2 * DIM + 1, DIM)) for _ in range(3)]
    model = nn.Sequential(nn.Linear(DIM, DIM), *blocks)
    for block in blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


class Program:
    """Trains a model in the simulation. `make`: (parameters) -> an optimizer."""

    def __init__(self, simulation: Simulation, beside: bool, make: Any = torch.optim.AdamW, **options: Any) -> None:
        self.simulation, self.model = simulation, build(**options)
        made = make(self.model.parameters(), lr=0.1, foreach=True)
        self.optimizer: Any = flatten_optimizer(made, overlap_with_forward=beside)
        self.side = simulation.stream("side")
        # What a program has read.
        self.seen: list[Tensor] = []

    def late(self) -> Any:
        return vars(self.optimizer)["_fsdp2_flat_steps"].late

    def backward(self) -> None:
        self.model(torch.ones(2, DIM)).float().square().sum().backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def see(self, tensor: Tensor) -> None:
        self.seen.append(getattr(tensor, "_local_tensor", tensor).detach().clone())

    def result(self) -> list[Tensor]:
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return [*self.seen, *(getattr(each, "_local_tensor", each) for each in (*self.model.parameters(), *states))]


def judge(simulation: Simulation) -> None:
    assert not simulation.problems, "\n".join(f"{n} x {text}" for text, n in simulation.problems.most_common(10))


def run(beside: bool, program: Callable[[Program], Any], **options: Any) -> tuple[Program, Simulation, list[Tensor]]:
    with simulated_world(RANKS) as simulation:
        this = Program(simulation, beside, **options)
        with simulation:
            for _ in range(2):
                this.step()
            program(this)
        return this, simulation, [tensor.clone() for tensor in this.result()]


def compare(program: Callable[[Program], Any], **options: Any) -> Program:
    """Runs a program with steps beside and in the usual order. Returns the first."""
    this, simulation, result = run(True, program, **options)
    judge(simulation)
    _, _, expected = run(False, program, **options)
    assert len(result) == len(expected)
    assert all(map(torch.equal, result, expected))
    return this


# ---- programs


def usual(this: Program) -> None:
    for _ in range(4):
        this.step()


def with_clipping(this: Program) -> None:
    for _ in range(3):
        this.backward()
        clip_grad_norm_(this.model.parameters(), 0.1)
        this.optimizer.step()
        this.optimizer.zero_grad()


def with_a_schedule(this: Program) -> None:
    scheduler = torch.optim.lr_scheduler.ExponentialLR(this.optimizer, 0.5)
    for _ in range(3):
        this.step()
        scheduler.step()


def accumulated(this: Program) -> None:
    """Gradients that are kept, and added to."""
    for _ in range(3):
        this.backward()
        this.optimizer.step()


def evaluated(this: Program) -> None:
    for _ in range(3):
        this.step()
        with torch.no_grad():
            this.see(this.model(torch.ones(2, DIM)))


def without_a_layer(this: Program) -> None:
    """A group that forward leaves out after a step on it."""
    for i in range(4):
        modules = [*this.model] if i != 1 else [this.model[0], *this.model[2:]]
        with torch.no_grad():
            this.model(torch.ones(2, DIM))  # the outermost forward gathers the root's own
        x = torch.ones(2, DIM)
        this.model.unshard()
        for module in modules[1:]:
            x = module(x)
        x.float().sum().backward()
        this.optimizer.step()
        this.optimizer.zero_grad()


PROGRAMS = [usual, with_clipping, with_a_schedule, accumulated, evaluated, without_a_layer]
WAYS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"mp_policy": BF16},
    "kept": {"reshard_after_forward": False},
    "SGD": {"make": partial(torch.optim.SGD, momentum=0.5)},
}


# Each way meets half of the programs, and each program half of the ways. The nightly run takes all.
DEALT = [(way, each) for i, way in enumerate(WAYS) for j, each in enumerate(PROGRAMS) if NIGHTLY or (i + j) % 2 == 0]


@pytest.mark.parametrize(("way", "program"), DEALT, ids=lambda value: getattr(value, "__name__", value))
def test_bits_and_order_are_those_of_steps_in_the_usual_order(way: str, program: Callable[[Program], Any]) -> None:
    this = compare(program, **WAYS[way])
    assert this.late().taken >= 3


def test_secondary_shards_are_made_behind_the_step() -> None:
    """The simulation has no values for them: every rank holds what this one has."""
    this, simulation, _ = run(True, usual, reshard_after_forward=2)
    judge(simulation)
    assert this.late().taken == 5


# ---- readers and writers between the step and the forward


def on_side(this: Program, what: Callable[[], Any]) -> None:
    """A user orders the other stream as always: behind the one on which the optimizer was called."""
    this.side.wait_stream(this.simulation.current)
    with this.side:
        what()


def whole_and_parts(this: Program) -> None:
    for parameter in this.model.parameters():
        this.see(parameter.to_local())
        this.see((parameter * 2).to_local())
        this.see(parameter.data.to_local())


def state_dicts(this: Program) -> None:
    for value in this.model.state_dict().values():
        this.see(value.to_local())
    for state in this.optimizer.state_dict()["state"].values():
        for value in state.values():
            this.see(value.to_local() if hasattr(value, "to_local") else value)


def pickled(this: Program) -> None:
    pickle.dumps(next(this.model.parameters()))
    for parameter in copy.deepcopy([*this.model.parameters()]):
        this.see(parameter.to_local())


def full(this: Program) -> None:
    with full_params(this.model):
        for parameter in this.model.parameters():
            this.see(parameter)


def gathered_by_hand(this: Program) -> None:
    this.model.unshard()
    for parameter in this.model.parameters():
        this.see(parameter)
    this.model.reshard()


def writes(this: Program) -> None:
    with torch.no_grad():
        for parameter in this.model.parameters():
            parameter.mul_(0.5)


def writes_to_gradients(this: Program) -> None:
    for parameter in this.model.parameters():
        parameter.grad.zero_()


def cleared_in_place(this: Program) -> None:
    this.optimizer.zero_grad(set_to_none=False)


def another_optimizer(this: Program) -> None:
    torch.optim.SGD(this.model.parameters(), lr=0.1).step()


def assigned(this: Program) -> None:
    for parameter in this.model.parameters():
        parameter.data = parameter.data * 0.5


def loaded(this: Program) -> None:
    this.optimizer.load_state_dict(this.optimizer.state_dict())
    this.model.load_state_dict(this.model.state_dict())


READERS = [
    *(whole_and_parts, state_dicts, pickled, full, gathered_by_hand, writes, writes_to_gradients, cleared_in_place),
    *(another_optimizer, assigned, loaded),
]


# The engine's own streams are judged by test_stream_order.py. The nightly run has the others on both streams.
ONLY_HERE = (full, gathered_by_hand, cleared_in_place, another_optimizer)
PLACES = [
    (read, elsewhere)
    for i, read in enumerate(READERS)
    for elsewhere in ((False,) if read in ONLY_HERE else (False, True) if NIGHTLY else (i % 2 == 0,))
]


@pytest.mark.parametrize(("read", "elsewhere"), PLACES, ids=lambda value: getattr(value, "__name__", value))
def test_whoever_reads_or_writes_in_between_waits(read: Callable[[Program], Any], elsewhere: bool) -> None:
    def program(this: Program) -> None:
        for _ in range(2):
            this.backward()
            this.optimizer.step()
            if elsewhere:
                on_side(this, partial(read, this))
                this.simulation.current.wait_stream(this.side)
            else:
                read(this)
            this.optimizer.zero_grad()
        this.step()

    assert compare(program).late().taken >= 1


def test_a_reader_on_a_stream_that_was_ordered_before_forward_waits() -> None:
    """When the stream that computes has waited for the step already."""

    def program(this: Program) -> None:
        this.backward()
        this.optimizer.step()
        this.side.wait_stream(this.simulation.current)
        this.backward()
        with this.side:
            whole_and_parts(this)
        this.simulation.current.wait_stream(this.side)
        this.optimizer.zero_grad()

    assert compare(program).late().taken == 2


HELD: dict[str, Callable[[Program], list[Tensor]]] = {
    "local tensors": lambda this: [parameter.to_local() for parameter in this.model.parameters()],
    "views": lambda this: [parameter.detach() for parameter in this.model.parameters()],
    "gradients": lambda this: [parameter.grad.to_local() for parameter in this.model.parameters()],
    "states": lambda this: [
        value.to_local() for state in this.optimizer.state.values() for name, value in state.items() if name != "step"
    ],
}


@pytest.mark.parametrize("what", HELD)
def test_what_a_user_holds_makes_a_step_usual(what: str) -> None:
    """It could be read without notice."""
    taken: list[Any] = []

    def program(this: Program) -> None:
        this.backward()
        held = HELD[what](this)
        this.optimizer.step()
        taken.append(this.late() and this.late().taken)
        for each in held:
            this.see(each.to_local() if hasattr(each, "to_local") else each)
        this.optimizer.zero_grad()
        del held
        this.step()

    compare(program)
    assert taken == [1, None]


def test_after_reads_steps_are_in_the_usual_order_for_a_while() -> None:
    def program(this: Program) -> None:
        for _ in range(20):
            this.step()
            whole_and_parts(this)

    assert run(True, program)[0].late().taken == 5  # two, and one each behind 1, 3 and 7 others


def test_options_that_the_device_reads_make_a_step_usual() -> None:
    def program(this: Program) -> None:
        this.optimizer.param_groups[0].update(lr=torch.tensor(0.1), foreach=False)
        this.step()
        this.optimizer.param_groups[0].update(lr=0.1)
        this.optimizer.found_inf = torch.zeros(1)  # as a GradScaler sets it
        with pytest.raises(AssertionError):  # AdamW takes it if it is fused, which no CPU steps beside
            this.step()

    assert run(True, program)[0].late().taken == 1


def test_no_steady_step_makes_the_host_wait() -> None:
    with simulated_world(RANKS) as simulation:
        this = Program(simulation, beside=True)
        waits = [count_host_waits(simulation, this.step) for _ in range(7)]
        counts = {place for place in waits[-1] if not place.startswith("_local_scalar_dense")}  # counts on the CPU
        assert not counts
        assert this.late().taken == 6


def test_forward_waits_for_one_group_after_the_other() -> None:
    """Of the groups that follow, one is gathered ahead. All are stepped on in the order of forward."""
    waited: list[Any] = []
    wait = LateStep.wait

    with simulated_world(RANKS) as simulation, pytest.MonkeyPatch.context() as patch:
        this = Program(simulation, beside=True)
        with simulation:
            for _ in range(3):
                this.step()
            patch.setattr(LateStep, "wait", lambda late: waited.append(late) or wait(late))
            at: list[int] = []
            for module in this.model[1:]:
                module.register_forward_pre_hook(lambda *_: at.append(len({*map(id, waited)})))
            this.backward()
    assert at == [3, 4, 4]
    order = [late._waited for late in dict.fromkeys(waited)]
    assert all(streams == [simulation.main] for streams in order)


class WithRows(Program):
    """Has a vocabulary-parallel embedding; this rank asks for rows of its own."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation, beside=True)
        torch.manual_seed(0)
        table, blocks = nn.Embedding(RANKS * 3, DIM), [nn.Linear(DIM, DIM) for _ in range(3)]
        vocab_parallel_embedding(table)
        for block in blocks:
            fully_shard(block)
        self.model = fully_shard(nn.Sequential(table, *blocks))
        made = torch.optim.AdamW(self.model.parameters(), lr=0.1, foreach=True)
        self.optimizer = flatten_optimizer(made, overlap_with_forward=True)

    def backward(self) -> None:
        self.model(torch.tensor([3, 5, 3])).square().sum().backward()


def test_a_vocab_parallel_embedding_is_stepped_on_where_forward_looks_it_up() -> None:
    """It is not gathered, but runs first: behind the steps on all others, its lookup would wait for all of them."""
    issued: list[Any] = []
    add = LateSteps.add
    with simulated_world(RANKS) as simulation, pytest.MonkeyPatch.context() as patch:
        this = WithRows(simulation)
        patch.setattr(LateSteps, "add", lambda steps, group, late: issued.append(group.name) or add(steps, group, late))
        with simulation:
            for _ in range(4):
                issued.clear()
                this.step()
        assert this.late().taken == 3
    judge(simulation)
    assert issued == ["0", "1", "2", "3"]


# ---- planted faults


@contextmanager
def without(cls: type, name: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cls, name, lambda *_: None)
        yield


@pytest.mark.parametrize(("cls", "name"), [(LateSteps, "__call__"), (LateSteps, "read"), (LateStep, "__del__")])
def test_faults_are_found(cls: type, name: str) -> None:
    def program(this: Program) -> None:
        this.step()
        if name == "read":
            for parameter in this.model.parameters():
                this.see(parameter.to_local())
        elif name == "__call__":
            this.backward()
        else:
            del this.model, this.optimizer
            gc.collect()
            torch.ones(1).add_(1)

    def problems() -> Any:
        with simulated_world(RANKS) as simulation:
            this = Program(simulation, beside=True)
            with simulation:
                for _ in range(2):
                    this.step()
                program(this)
                del this
        return simulation.problems

    assert not problems()
    with without(cls, name):
        found = problems()
    assert any(each.startswith("early free" if name == "__del__" else "race") for each in found), found


# ---- what is refused


class Own(torch.optim.AdamW):
    pass


def test_refusals() -> None:
    with simulated_world(RANKS):
        model = build()
        with pytest.raises(TypeError, match=r"overlap_with_forward calls its step once for each group"):
            flatten_optimizer(Own(model.parameters()), overlap_with_forward=True)
        optimizer = flatten_optimizer(torch.optim.AdamW(model.parameters()))
        assert flatten_optimizer(optimizer, overlap_with_forward=True) is optimizer
        assert copy.deepcopy(optimizer).overlaps_forward
        with pytest.raises(ValueError, match="steps that overlap the next forward"):
            model.set_optimizer_in_backward(optimizer)
