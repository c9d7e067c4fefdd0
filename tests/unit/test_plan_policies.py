"""Tests which modules a wrap policy chooses, and that tied parameters stay together."""

import functools
from typing import Any

import pytest
from torch import nn
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

import fsdp2
from fsdp2 import wrap_groups
from fsdp2.planning.plan import Plan
from models import CausalBlock, TinyGPT

BLOCKS = ["blocks.0", "blocks.1"]
NUMEL = sum(p.numel() for p in CausalBlock(6, 2).parameters())


def names(model: nn.Module, policy: Any = None) -> list[str]:
    return [group.name for group in wrap_groups(model, policy)]


def is_block(module: nn.Module) -> bool:
    return isinstance(module, CausalBlock)


@pytest.mark.parametrize(
    "policy",
    [
        None,
        CausalBlock,
        "CausalBlock",
        {CausalBlock},
        [CausalBlock],
        {CausalBlock: {}},
        NUMEL,
        lambda module: isinstance(module, CausalBlock),
        lambda name, module: name.startswith("blocks.") and name.count(".") == 1,
        ModuleWrapPolicy({CausalBlock}),
        CustomPolicy(is_block),
        functools.partial(size_based_auto_wrap_policy, min_num_params=NUMEL),
        functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={CausalBlock}),
        functools.partial(lambda_auto_wrap_policy, lambda_fn=is_block),
        lambda module, recurse, nonwrapped_numel: recurse or is_block(module),
    ],
)
def test_policies_of_all_kinds_choose_the_blocks(policy: Any) -> None:
    assert names(TinyGPT(), policy) == BLOCKS


def test_size_counts_what_no_chosen_module_inside_has() -> None:
    """As torch's policy does: two of the four Linears of a block reach 80 elements, and leave less than that."""
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 10, bias=False), nn.Linear(8, 2, bias=False)), nn.Linear(8, 20))
    assert names(model, 80) == ["0.0", "1"]
    assert names(model, 97) == ["1"]
    assert names(model, 96) == ["0", "1"] or names(model, 96) == ["1", "0"]
    for size in (80, 96, 97):
        torchs = functools.partial(size_based_auto_wrap_policy, min_num_params=size)
        assert names(model, torchs) == names(model, size)


def test_every_module_comes_before_the_one_around_it() -> None:
    model = TinyGPT()
    chosen = [module for group in wrap_groups(model, always_wrap_policy) for module in group.modules]
    assert {*chosen} == {m for m in model.modules() if m is not model and not isinstance(m, nn.ModuleList)}
    for i, module in enumerate(chosen):
        assert not {*module.modules()} & {*chosen[i + 1 :]}


def test_modules_without_parameters_and_containers_are_left_out() -> None:
    model = nn.Sequential(nn.ReLU(), nn.ModuleList([nn.Linear(2, 2)]), nn.Linear(2, 2))
    assert names(model, lambda module: True) == ["1.0", "2"]


def test_options_are_those_of_the_policy() -> None:
    kept = {"reshard_after_forward": False}
    for policy in (
        {CausalBlock: kept},
        lambda name, module: kept if is_block(module) else False,
        CustomPolicy(lambda module: kept if is_block(module) else False),
    ):
        assert [group.options for group in wrap_groups(TinyGPT(), policy)] == [kept, kept]


def test_classes_that_the_model_names_are_taken_first() -> None:
    model = TinyGPT()
    model._no_split_modules = ["Linear"]  # as models of Transformers do
    assert "blocks.0.qkv" in names(model)
    model._no_split_modules = ["Other"]
    assert names(model) == BLOCKS


# ---- tied parameters


def test_tied_modules_are_one_group() -> None:
    """The embedding is chosen and the head is not, or both are: each way they are one call on a list."""
    for policy in ([CausalBlock, nn.Embedding], [CausalBlock, nn.Embedding, nn.Linear], 20):
        groups = wrap_groups(TinyGPT(tied=True), policy)
        (tied,) = (group for group in groups if len(group.modules) > 1)
        assert [type(module) for module in tied.modules] == [nn.Embedding, nn.Linear]
        assert isinstance(tied.module, list)
        assert sum(isinstance(module, nn.Embedding) for group in groups for module in group.modules) == 1


class SharesWithInner(nn.Module):
    """Has a weight of a module inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.weight = self.inner.weight


def test_what_is_tied_to_a_module_around_it_is_left_to_that() -> None:
    model = nn.Sequential(SharesWithInner(), nn.Linear(4, 4))
    assert sorted(names(model, lambda module: True)) == ["0", "1"]
    assert names(model[0], lambda module: True) == []


def test_two_ties_join_three_modules() -> None:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    model[1].weight = model[0].weight
    model[2].bias = model[1].bias
    (tied, alone) = sorted(wrap_groups(model, nn.Linear), key=lambda group: -len(group.modules))
    assert [len(tied.modules), alone.name] == [3, "3"]


class Head(nn.Module):
    """Has a Linear whose bias it also holds itself, as heads of BERT do."""

    def __init__(self, vocab: int, dim: int) -> None:
        super().__init__()
        self.decoder = nn.Linear(dim, vocab)
        self.bias = self.decoder.bias


def test_a_module_that_joins_brings_what_it_is_tied_to() -> None:
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), Head(9, 4))
    model[2].decoder.weight = model[0].weight
    for policy in (nn.Embedding, [nn.Embedding, nn.Linear], lambda module: True):
        (tied,) = (group for group in wrap_groups(model, policy) if len(group.modules) > 1)
        assert tied.modules == (model[0], model[2])


def test_what_is_tied_to_the_model_itself_is_left_to_it() -> None:
    model = TinyGPT(tied=True)
    model.table = model.embed.weight
    assert names(model, [CausalBlock, nn.Embedding]) == BLOCKS


# ---- errors


@pytest.mark.parametrize(
    ("policy", "error", "text"),
    [
        ("Bloc", ValueError, "Bloc matches no module of TinyGPT.*CausalBlock, Embedding, LayerNorm, Linear"),
        (["Bloc", nn.LSTM], ValueError, "Bloc, LSTM matches no module"),
        ({"Bloc": {}}, ValueError, "Bloc matches no module"),
        ([], ValueError, "an empty collection matches"),
        (0, ValueError, "a number of elements above 0, got 0"),
        (True, ValueError, "a number of elements above 0, got True"),
        ([3], TypeError, "classes of modules, or their names, got 3"),
        ({CausalBlock: 3}, TypeError, "a dict of arguments"),
        (lambda module: 3, TypeError, "a bool or a dict for the model, got 3"),
        (lambda a, b, c: True, TypeError, "got one of a, b, c"),
        (object(), TypeError, "got object"),
        ({CausalBlock: {"mesh": 3}}, ValueError, "blocks.0: expected the arguments reshard_after_forward"),
    ],
)
def test_errors_say_what_to_write(policy: Any, error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        wrap_groups(TinyGPT(), policy)


@pytest.mark.parametrize(
    "policy",
    [
        nn.LSTM,
        {nn.LSTM},
        {nn.LSTM: {"reshard_after_forward": False}},
        10**9,
        lambda module: False,
        lambda name, module: "encoder" in name,
        ModuleWrapPolicy({nn.LSTM}),
        CustomPolicy(lambda module: False),
        functools.partial(size_based_auto_wrap_policy, min_num_params=10**9),
        functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.LSTM}),
    ],
)
def test_policies_that_match_nothing_leave_all_to_the_model(policy: Any) -> None:
    """As in FSDP1; a warning says so. A plan with such a policy says it, too."""
    with pytest.warns(UserWarning, match=r"matches no module of TinyGPT.*CausalBlock.*one group of all"):
        assert wrap_groups(TinyGPT(), policy) == []
    with pytest.warns(UserWarning, match="matches no module"):
        made = plan(policy=policy)
    assert len(made.groups) == 1
    assert any("the policy matches nothing. Pass another" in note for note in made.notes)


def plan(model: Any = None, **arguments: Any) -> Plan:
    return fsdp2.plan(TinyGPT() if model is None else model, **{"ranks": 2, **arguments})


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"model": 3}, TypeError, "model: expected an nn.Module, got int"),
        ({"ranks": 0}, ValueError, "ranks: expected 1 or more, got 0"),
        ({"ranks": 2.0}, TypeError, "ranks: expected an int, or a list of them, got 2.0"),
        ({"ranks": []}, ValueError, "ranks: expected one number or more"),
        ({"policy": {"Blok": {}}}, ValueError, "Blok matches no module"),
        ({"ranks": [2, "3"]}, TypeError, "ranks: expected an int, got '3'"),
        ({"optimizer": "adamwx"}, ValueError, "optimizer: expected one of .*'adamw'"),
        ({"optimizer": -1}, ValueError, "optimizer: expected 0 bytes"),
        ({"batch": 3}, TypeError, "expected functions for batch and loss, got int"),
        ({"mp_policy": 3}, TypeError, "mp_policy: expected a MixedPrecisionPolicy, got int"),
        ({"settings": []}, ValueError, "settings: expected one or more"),
        ({"settings": [3]}, TypeError, "settings: expected dicts, got int"),
        ({"settings": [{"shards": 3}]}, ValueError, "settings: expected .*got shards"),
        ({"settings": [{"replicas": 3}]}, ValueError, "replicas: expected a divisor of 2 ranks, got 3"),
        ({"settings": [{"reshard_after_forward": 3}]}, ValueError, "reshard_after_forward: expected a divisor"),
    ],
)
def test_errors_of_plan(arguments: dict[str, Any], error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        plan(**arguments)
