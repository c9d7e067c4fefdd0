"""Tests what settings do in a step (its numbers stay the same: tests/ranks/test_settings.py), on one of four ranks.

test_settings_on_topologies.py tests that each setting has an effect; here is which, where no other test says it: the
bytes and numbers of collectives are those of test_schedule_model.py and test_comm_counts.py.
"""

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from recorder import record
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from fsdp2 import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    set_checks,
    share_comm_ctx,
)
from fsdp2.compression import Compression
from fsdp2.devices import streams
from fsdp2.engine.state import groups_below, groups_of, require_state
from helpers import fake_world, public_methods
from simulated_device import Stream

RANKS = 4


@pytest.fixture(autouse=True)
def _world() -> Iterator[None]:
    with fake_world(RANKS):
        yield


class Add(nn.Module):
    """Its backward reads no weight; one parameter is never used. `rows` tells its payloads from others'."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(rows, 4))
        self.unused = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight.sum(0)


class Root(Add):
    """Two blocks, and parameters of its own."""

    def __init__(self) -> None:
        super().__init__(4)
        self.b0, self.b1 = Add(8), Add(16)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.b1(self.b0(x)))


NAMES = ("root", "b0", "b1")


def build(model: Any = None, **options: Any) -> Any:
    model = Root() if model is None else model
    for module in (model.b0, model.b1, model):
        fully_shard(module, **options)
    return model


def hsdp(**options: Any) -> Any:
    return build(mesh=init_device_mesh("cpu", (2, 2)), **options)


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 4)).sum().backward()


def trace(model: nn.Module, steps: int = 2) -> list[str]:
    """Returns what the last of some steps did; the first has no order to follow yet."""
    lines = record(model)
    for name, param in model.named_parameters():
        if "weight" in name:
            _, _, owner = name.rpartition(".weight")[0].rpartition(".")
            param.register_post_accumulate_grad_hook(lambda _, owner=owner: lines.append(f"grad   {owner or 'root'}"))
    for _ in range(steps):
        lines.clear()
        backward(model)
        model.zero_grad()
    return lines


def choices(model: nn.Module) -> list[Any]:
    """Returns what is chosen for the root, and for each group."""
    return [require_state(model).root.settings, *map(chosen_for, groups_below(model))]


def chosen_for(group: Any) -> tuple[Any, ...]:
    comms = group.comms
    return group.settings, comms.reduces.force_sum, comms.reduces.group is comms.gathers.group


# ---- settings of several modules at once -----------------------------------------------------------------------------


# Setters with `recurse`, each with a value that is not the default.
RECURSIVE: dict[str, Any] = {
    "set_requires_gradient_sync": False,
    "set_requires_all_reduce": False,
    "set_reshard_after_forward": True,
    "set_reshard_after_backward": False,
    "set_unshard_in_backward": False,
    "set_reduce_scatter_unused_params": True,
    "set_reduce_scatter_max_input_buffers": 3,
    "set_gradient_buckets": 1,
    "set_gradient_divide_factor": 3.0,
    "set_force_sum_reduction_for_comms": True,
    "set_all_reduce_hook": print,
    "set_separate_reduce_scatter_group": True,
    "set_keep_unsharded_storage": True,
    "set_free_viewed_storage": True,
}


def parameters_of(method: str) -> dict[str, inspect.Parameter]:
    parameters = dict(inspect.signature(getattr(FSDPModule, method)).parameters)
    del parameters["self"]
    return parameters


@pytest.mark.parametrize("name", [name for name in sorted(public_methods()) if "recurse" in parameters_of(name)])
def test_recurse(name: str) -> None:
    """A setter acts on the module's own group, and with `recurse` on those inside it; never on one outside."""
    default = inspect.signature(getattr(FSDPModule, name)).parameters["recurse"].default

    def changed(on: str = "", **options: Any) -> set[str]:
        model = build()
        before = {group.name: chosen_for(group) for group in groups_below(model)}
        getattr(model.get_submodule(on), name)(RECURSIVE[name], **options)
        return {group.name for group in groups_below(model) if chosen_for(group) != before[group.name]}

    assert changed(recurse=False) == {"root"}
    assert changed(recurse=True) == set(NAMES)
    assert changed() == (set(NAMES) if default else {"root"})
    assert changed(on="b1", recurse=True) == {"b1"}


# ---- what a setting does ---------------------------------------------------------------------------------------------


def gathers(lines: list[str]) -> list[str]:
    return [line.split()[1] for line in lines if line.startswith("gather")]


def test_unshard_and_reshard() -> None:
    model = build()
    (group,) = groups_of(model.b0)
    lines = record(model)
    handle = model.b0.unshard(async_op=True)
    assert gathers(lines) == ["b0"]
    assert isinstance(model.b0.weight, DTensor), "not before wait"
    handle.wait()
    handle.wait()
    assert model.b0.unshard() is None
    assert gathers(lines) == ["b0"]
    assert not isinstance(model.b0.weight, DTensor)
    assert isinstance(model.weight, DTensor), "its own group only"
    assert group.unsharded.storage.nbytes() > 0
    model.b0.reshard()
    assert isinstance(model.b0.weight, DTensor)
    assert group.unsharded.storage.nbytes() == 0


def gathers_before_b0_runs(modules: list[Any] | None) -> list[str]:
    model, before = build(), []
    if modules is not None:
        model.b0.set_modules_to_forward_prefetch(modules)
    lines = record(model)
    model.b0.register_forward_pre_hook(lambda *_: before.append(gathers(lines)))
    for _ in range(2):
        lines.clear()
        backward(model)
    return before[-1]


def test_forward_prefetch() -> None:
    def order(modules: Callable[[Any], list[Any]]) -> list[str]:
        model = build(reshard_after_forward=False)
        model.set_modules_to_forward_prefetch(modules(model))
        return gathers(trace(model))

    assert order(lambda model: [model.b0]) == ["root", "b0", "b1"]
    assert order(lambda model: [model.b1, model.b0]) == ["root", "b1", "b0"]
    assert order(lambda model: [model.b1]) == ["root", "b1", "b0"]
    assert order(lambda model: []) == ["root", "b0", "b1"]
    assert gathers_before_b0_runs(None) == ["root", "b0", "b1"]
    assert gathers_before_b0_runs([]) == ["root", "b0"]


def test_backward_prefetch() -> None:
    def order(modules: Callable[[Any], list[Any]]) -> list[str]:
        model = build(reshard_after_forward=True)
        model.set_modules_to_backward_prefetch(modules(model))
        return gathers(trace(model))[3:]

    assert order(lambda model: [model.b1]) == ["root", "b1", "b0"]
    assert order(lambda model: [model.b0, model.b1]) == ["root", "b0", "b1"]
    assert order(lambda model: [model.b0]) == ["root", "b0", "b1"]
    assert gathers_before_b1s_backward(lambda model: None) == ["root", "b1"]
    assert gathers_before_b1s_backward(lambda model: model.set_modules_to_backward_prefetch([])) == ["root"]


def gathers_before_b1s_backward(configure: Callable[[Any], object]) -> list[str]:
    model, before = build(reshard_after_forward=True), []
    configure(model)
    lines = record(model)
    note_gathers(model, lines, before)
    for _ in range(2):
        lines.clear()
        backward(model)
        with torch.no_grad():
            [parameter.add_(0) for parameter in model.parameters()]  # a step, for which nothing stays
    return before[-1][3:]


def note_gathers(model: Any, lines: list[str], before: list[list[str]]) -> None:
    """Whenever backward reaches b1: what has been gathered until then."""

    def note(_: Tensor) -> None:
        before.append(gathers(lines))

    model.b1.register_forward_hook(lambda module, args, output: output.register_hook(note) and None)


class Collective:
    """A user's collective that writes down its calls; `work`: what it returns."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.sizes: list[tuple[int, ...]] = []

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.sizes.append(tuple(size))
        return torch.zeros(size, dtype=dtype, device=device)

    def __call__(self, **arguments: Any) -> None:
        self.calls.append(arguments)


def test_custom_all_gather() -> None:
    model, gather = build(), Collective()
    model.b0.set_custom_all_gather(gather)
    backward(model)
    assert len(gather.calls) == 2, "forward and backward, of one group"
    assert gather.sizes == [(RANKS * 48,)] * 2
    for call in gather.calls:
        output, own = call["output_tensor"], call["input_tensor"]
        assert output.dtype == own.dtype == torch.uint8
        assert (own.data_ptr(), own.numel()) == (output.data_ptr(), output.numel() // RANKS), "this rank's part of it"
    assert [call["group"] for call in gather.calls] == [groups_of(model.b0)[0].mesh.shard_group] * 2


def test_custom_reduce_scatter() -> None:
    model, scatter = build(), Collective()
    model.b0.set_custom_reduce_scatter(scatter)
    backward(model)
    (call,) = scatter.calls
    assert sorted(scatter.sizes) == [(8,), (32,)]
    assert [call["output_tensor"].numel(), call["input_tensor"].numel()] == [8, 32]
    assert call["op"] == dist.ReduceOp.AVG
    model.b0.set_gradient_divide_factor(3.0)
    backward(model)
    assert scatter.calls[-1]["op"] == dist.ReduceOp.SUM


def test_bytes_gathered_ahead() -> None:
    def ahead(budget: int | None) -> list[str]:
        return gathers_before_b1s_backward(lambda model: model.set_unsharded_budget(budget))

    model = build()
    first, second = (groups_of(block)[0].nbytes for block in (model.b1, model.b0))
    assert ahead(None) == ahead(first) == ahead(first + second - 1) == ["root", "b1"]
    assert ahead(first + second) == ["root", "b1", "b0"]
    assert ahead(first - 1) == ahead(0) == ["root"]


def test_ranks_meet_before_each_collective() -> None:
    """At the debug level a small all-gather comes before each collective."""

    def collectives(model: Any) -> dict[Any, int]:
        with CommDebugMode() as seen:  # its own hooks ask for an input that requires a gradient
            model(torch.ones(2, 4, requires_grad=True)).sum().backward()
        return dict(seen.get_comm_counts())

    def gathers_and_all(level: str, make: Callable[[], Any]) -> tuple[int, int]:
        model = make()
        for each in ("debug", level):
            set_checks(each)
        for _ in range(2):
            backward(model)
        seen = collectives(model)
        set_checks("default")
        return seen[torch.ops.c10d._allgather_base_], sum(seen.values())

    for make in (build, hsdp, lambda: build(reshard_after_forward=2)):
        plain, all_plain = gathers_and_all("default", make)
        gathers, everything = gathers_and_all("debug", make)
        rollcalls = gathers - plain
        assert rollcalls >= everything - rollcalls >= all_plain  # checks compare ranks in each step, too


def test_further_backwards_are_gathered_ahead() -> None:
    """Of two forwards, then two backwards, the second finds the record of the first forward."""

    def ahead(is_last: bool) -> list[str]:
        model, before = build(reshard_after_forward=True), []
        lines = record(model)
        note_gathers(model, lines, before)
        first, second = model(torch.ones(2, 4)).sum(), model(torch.ones(2, 4)).sum()
        model.b0.set_is_last_backward(is_last)
        second.backward()
        lines.clear()
        model.set_is_last_backward(True)
        first.backward()
        return before[-1]

    assert ahead(is_last=False) == ["root", "b1"]
    assert ahead(is_last=True) == ["root"]


class Event:
    """What was done when it was waited for."""

    def __init__(self, lines: list[str]) -> None:
        self.lines, self.waits = lines, []

    def wait(self) -> None:
        self.waits.append(list(self.lines))


def test_optimizer_event() -> None:
    model = build()
    lines = record(model)
    event = Event(lines)
    model.set_post_optim_event(event)
    assert event.waits == []
    for _ in range(2):
        backward(model)
    assert event.waits == [[]], "once, before the first gather"
    later = Event(lines)
    model.set_post_optim_event(event)
    model.set_post_optim_event(later)
    backward(model)
    assert (len(event.waits), len(later.waits)) == (1, 1), "the last one set"


def test_manual_finalisation() -> None:
    for async_op in (False, True):
        model = build()
        model.set_reduce_scatter_max_input_buffers(9)
        backward(model)
        assert model.weight.grad is not None
        model.zero_grad()
        model.set_manual_backward_finalization(True)
        backward(model)
        assert all(param.grad is None for param in model.parameters())
        handle = model.finalize_backward(async_op=async_op)
        if async_op:
            assert model.weight.grad is None, "not before wait"
            handle.wait()
        assert all(module.weight.grad is not None for module in (model, model.b0, model.b1))


def test_the_largest_number_of_reductions_in_flight_counts() -> None:
    def is_delivered_early(buffers: int) -> bool:
        model = build()
        model.set_reduce_scatter_max_input_buffers(1)
        model.b1.set_reduce_scatter_max_input_buffers(buffers)
        lines = trace(model)
        return lines.index("grad   b1") < lines.index("reduce root  64")

    assert is_delivered_early(1)
    assert not is_delivered_early(3)


def test_reset() -> None:
    model = build()
    model.unshard()
    model.set_requires_gradient_sync(False)
    backward(model)
    assert model.weight.grad is not None
    model.unshard()
    model.reset_iter_state()
    assert isinstance(model.weight, DTensor)
    assert groups_of(model)[0].unsharded.storage.nbytes() == 0
    assert all(param.grad is None for param in model.parameters()), "dropped"


class Skipping(Root):
    """May leave `b0` out."""

    runs_b0 = True

    def forward(self, x: Tensor) -> Tensor:
        return Add.forward(self, self.b1(self.b0(x) if self.runs_b0 else x))


def test_conditional() -> None:
    """What may be left out is not gathered ahead though the pass before had it."""

    def gathered(conditional: bool) -> tuple[list[str], list[str]]:
        model = Skipping()
        fully_shard(model.b0, conditional=conditional)
        fully_shard(model.b1)
        fully_shard(model)
        runs = gathers(trace(model))
        model.runs_b0 = False
        return runs, gathers(trace(model, steps=1))

    assert ["b0" in names for names in gathered(conditional=False)] == [True, True]
    assert ["b0" in names for names in gathered(conditional=True)] == [True, False]


def test_casts() -> None:
    for fields, inside, outside in (
        ({}, torch.float32, torch.float32),
        ({"param_dtype": torch.bfloat16}, torch.bfloat16, torch.bfloat16),
        ({"param_dtype": torch.bfloat16, "cast_forward_inputs": False}, torch.float32, torch.float32),
        ({"output_dtype": torch.float64}, torch.float32, torch.float64),
    ):
        model, seen = Root(), []
        model.register_forward_pre_hook(lambda module, args, seen=seen: seen.append(args[0].dtype))
        fully_shard(model, mp_policy=MixedPrecisionPolicy(**fields))
        assert (model(torch.ones(2, 4)).dtype, seen) == (outside, [inside]), fields


def test_ignored() -> None:
    model = Root()
    build(model, ignored_params={model.unused, model.b0.unused})
    assert not isinstance(model.unused, DTensor)
    assert not isinstance(model.b0.unused, DTensor)
    assert isinstance(model.b1.unused, DTensor)
    assert "gather b0    128" in trace(model)


# ---- values ----------------------------------------------------------------------------------------------------------


VALID: dict[str, Any] = {
    "modules": [],
    "max_input_buffers": 2,
    "factor": 2.0,
    "nbytes": 1,
    "when": "pre",
    "hook": None,
    "stream": None,
    "all_gather": None,
    "reduce_scatter": None,
    "event": None,
    "optimizer": None,
}


def test_values_other_than_bools_are_refused_by_name() -> None:
    """A truthy object must not count as True: nothing has changed then."""
    model = build()
    flags = {
        (method, name)
        for method in public_methods()
        for name, parameter in parameters_of(method).items()
        if parameter.annotation == "bool"
    }
    assert len(flags) > 20
    for (method, flag), wrong in itertools.product(flags, (1, 0, None, "yes", torch.tensor(True))):
        arguments = {name: VALID.get(name, True) for name in parameters_of(method)} | {flag: wrong}
        with pytest.raises(TypeError, match=f"^{flag}: expected a bool"):
            getattr(model, method)(**arguments)
    assert choices(model) == choices(build())


OF_THE_ROOT: dict[str, tuple[Any, ...]] = {
    "set_unsharded_budget": (0,),
    "set_running_stats_averaging": (False,),
    "set_manual_backward_finalization": (True,),
    "finalize_backward": (),
    "reset_iter_state": (),
    "set_optimizer_in_backward": (None,),
}


def test_values_that_are_refused() -> None:
    model, replicated = build(), hsdp()
    exchanging = build(mp_policy=MixedPrecisionPolicy(compression=Compression(reduce_scatter=torch.bfloat16)))
    refused: list[tuple[type[Exception], str, Callable[[], object]]] = [
        *(
            (ValueError, "max_input_buffers", lambda n=n: model.set_reduce_scatter_max_input_buffers(n))
            for n in (0, -1)
        ),
        *(
            (TypeError, "max_input_buffers", lambda n=n: model.set_reduce_scatter_max_input_buffers(n))
            for n in (1.5, True, None, "2")
        ),
        *(
            (ValueError, "factor", lambda factor=factor, call=call: call(factor))
            for factor in (0, -1, float("nan"), True, None, "2")
            for call in (model.set_gradient_divide_factor, model.set_reduce_scatter_divide_factor)
        ),
        *(
            (ValueError, "modules: .*Linear", lambda call=call: call([model.b0, nn.Linear(1, 1)]))
            for call in (model.set_modules_to_forward_prefetch, model.set_modules_to_backward_prefetch, share_comm_ctx)
        ),
        (ValueError, "reduce_scatter: .*compresses", lambda: exchanging.set_custom_reduce_scatter(Collective())),
        (ValueError, "a mesh that replicates", lambda: replicated.set_all_reduce_hook(print, stream=object())),
        *(
            (error, "nbytes", lambda wrong=wrong: model.set_unsharded_budget(wrong))
            for wrong, error in ((-1, ValueError), (True, TypeError), (1.5, TypeError))
        ),
        *(
            (RuntimeError, "root", lambda name=name, values=values: getattr(model.b0, name)(*values))
            for name, values in OF_THE_ROOT.items()
        ),
    ]
    for error, text, call in refused:
        with pytest.raises(error, match=text):
            call()
    assert choices(model) == choices(build())
    exchanging.set_custom_reduce_scatter(None)
    assert "reduce b1    128" in trace(exchanging)


def test_the_hooks_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook runs on it, behind what has been computed and before what follows."""
    lines: list[str] = []
    current, own = Stream("current", lines), Stream("own", lines)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device=None: current)
    model = build()
    with mock.patch.object(streams, "exist_on", return_value=True):
        model.set_all_reduce_hook(lambda reduced: lines.append("hook"), stream=own)
    backward(model)
    assert lines == ["own waits for current", "enter own", "hook", "leave own", "current waits for own"]
    lines.clear()
    model.set_all_reduce_hook(lambda reduced: lines.append("hook"))
    backward(model)
    assert lines == ["hook"]


COMMUNICATION: dict[str, Callable[[Any, Collective], object]] = {
    "gather": lambda model, collective: model.set_custom_all_gather(collective),
    "scatter": lambda model, collective: model.set_custom_reduce_scatter(collective),
    "separate": lambda model, collective: model.set_separate_reduce_scatter_group(True),
    "sum": lambda model, collective: model.set_force_sum_reduction_for_comms(True),
}


@pytest.mark.parametrize("settings", list(itertools.permutations(COMMUNICATION, 2)), ids=" then ".join)
def test_settings_of_communication_hold_together(settings: tuple[str, ...]) -> None:
    """Each stays in force when another is set after it."""
    model, calls = build(), {name: Collective() for name in COMMUNICATION}
    for setting in settings:
        COMMUNICATION[setting](model, calls[setting])
    group = groups_of(model)[0]
    backward(model)
    in_force = {
        "gather": len(calls["gather"].calls) == 1,
        "scatter": len(calls["scatter"].calls) == 1,
        "separate": group.comms.reduces.group is not group.comms.gathers.group,
        "sum": group.comms.reduces.force_sum,
    }
    assert in_force == {name: name in settings for name in COMMUNICATION}


def test_kept_storage_has_a_stable_address() -> None:
    """set_keep_unsharded_storage: the same address in each forward, though other memory is taken in between."""

    def addresses(keep: bool) -> set[tuple[int, ...]]:
        model, found, taken = build(reshard_after_forward=True), set(), []
        model.set_keep_unsharded_storage(keep)
        pointers: list[int] = []
        for module in (model, model.b0, model.b1):
            module.register_forward_pre_hook(lambda module, _: pointers.append(module.weight.data_ptr()))
        for _ in range(3):
            pointers.clear()
            model(torch.ones(2, 4)).sum().backward()
            found.add(tuple(pointers))
            taken += [torch.empty(group.nbytes, dtype=torch.uint8) for group in groups_below(model)]
        sizes = [group.unsharded.storage.nbytes() for group in groups_below(model)]
        assert sizes == [group.nbytes if keep else 0 for group in groups_below(model)]
        model.set_keep_unsharded_storage(False)
        assert all(group.unsharded.storage.nbytes() == 0 for group in groups_below(model)), "given back at once"
        return found

    assert len(addresses(keep=True)) == 1
    assert len(addresses(keep=False)) > 1


def test_modules_to_prefetch_that_never_run() -> None:
    """They are gathered, dropped at the end of the pass, and gathered again in the next."""
    model = Root()
    model.never = Add(32)
    fully_shard(model.never)
    build(model)
    model.set_modules_to_forward_prefetch([model.never])
    model.b1.set_modules_to_backward_prefetch([model.never])
    lines = trace(model)
    assert gathers(lines).count("never") == 2
    assert [line.split()[1] for line in lines if line.startswith("free")].count("never") == 2
    assert groups_of(model.never)[0].unsharded.storage.nbytes() == 0


def test_modules_under_another_root_are_gathered_once() -> None:
    """When the module before them runs, as asked for; and in the other root's own pass no more."""
    first, second = build(), build()
    first.b1.set_modules_to_forward_prefetch([second, second.b0])
    lines, later = record(first), record(second)
    first(torch.ones(2, 4))
    assert [*map(len, (gathers(lines), gathers(later)))] == [3, 2]
    second(torch.ones(2, 4))
    assert sorted(gathers(later)) == ["b0", "b1", "root"]
    first(torch.ones(2, 4))
    second.reshard()
    second.b0.reshard()
    assert not any(group.unsharded.storage.nbytes() for group in groups_below(second))


def test_roots_that_share_bound_their_reductions_together() -> None:
    """share_comm_ctx: one reduction of the other root in flight is one less for this root."""

    def gradients_there(shares: bool) -> list[bool]:
        first, second = build(), build()
        for model in (first, second):
            model.set_manual_backward_finalization(True)
        if shares:
            share_comm_ctx([first, second])
        backward(first)
        early = [module.weight.grad is not None for module in (first, first.b1, first.b0)]
        backward(second)
        later = [module.weight.grad is not None for module in (first, first.b1, first.b0)]
        return early + later

    assert gradients_there(shares=False) == [False, True, False] * 2
    assert gradients_there(shares=True) == [False, True, False, True, True, True]


class OneOfTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(512, 1024, bias=False) for _ in range(2))

    def forward(self, x: Tensor, which: str) -> Tensor:
        return getattr(self, which)(x)


def test_sums_between_replicas_that_were_put_off_have_their_own_names() -> None:
    """By which ranks compare what they do."""
    model = fully_shard(OneOfTwo(), mesh=init_device_mesh("cpu", (2, 2)))
    group = groups_of(model)[0]
    replicas, names = group.comms.replicas, []
    sum_up = replicas.all_reduce

    def note(*args: Any) -> Any:
        names.append(args[-1])
        return sum_up(*args)

    model.set_requires_all_reduce(False)
    model(torch.ones(1, 512), "first").sum().backward()
    model.set_requires_all_reduce(True)
    with mock.patch.object(replicas, "all_reduce", note):
        model(torch.ones(1, 512), "second").sum().backward()
    assert sorted(names) == [" of first.weight", " of second.weight"]
