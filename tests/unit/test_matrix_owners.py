"""Who owns which matrix, and which parameters a whole-matrix optimizer takes."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp2
from fsdp2.optim.cuts import Cut, find_matrices
from fsdp2.optim.plan import Member, cut_list, make_plan
from fsdp2.optim.split import MatrixSplit
from fsdp2.optim.whole_matrix import newton_schulz_cost

SHAPES = {
    "Llama 3 8B": 32 * [(4096, 4096)] * 2 + 64 * [(1024, 4096)] + 64 * [(14336, 4096)] + 32 * [(4096, 14336)],
    "attention of Qwen 3 30B-A3B": 48 * [(4096, 2048), (512, 2048), (512, 2048), (2048, 4096), (128, 2048)],
    "attention of GPT-OSS 120B": 36 * [(4096, 2880), (512, 2880), (512, 2880), (2880, 4096), (128, 2880)],
}


def member(shape: tuple[int, ...], ranks: int, dim: int = 0, blocks: Any = None) -> Member:
    return Member(
        Cut("p", shape, dim, ranks, 0, None, torch.device("cpu"), None), 0, blocks, torch.float32, torch.bfloat16
    )


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("ranks", [8, 64, 512])
def test_owners_are_balanced(name: str, ranks: int) -> None:
    """No rank has more than its share and one matrix; a tenth above it, where matrices are many enough for that."""
    members = [member(shape, ranks) for shape in SHAPES[name]]
    plan = make_plan(members, (), newton_schulz_cost, 64 << 20)
    (loads,) = plan.loads.values()
    costs = [newton_schulz_cost(*shape) for shape in SHAPES[name]]
    assert math.isclose(sum(loads), sum(costs))
    mean = sum(costs) / ranks
    assert max(loads) <= (1.1 * mean if max(costs) < mean and name.startswith("Llama") else max(costs) + mean)
    assert max(loads) == max(costs) or len(costs) > ranks
    owned = sorted(each.param for bucket in plan.buckets for matrices in bucket.owned for each in matrices)
    assert owned == [*range(len(members))]
    limit = max(32 << 20, max(rows * cols for rows, cols in SHAPES[name]))
    assert all(sum(each.numel for each in matrices) <= limit for bucket in plan.buckets for matrices in bucket.owned)


def test_owners_are_among_those_that_hold_a_part() -> None:
    """A router of few rows, and heads: of ten rows on four ranks, which have 5, 5, 5 and 5."""
    plan = make_plan([member((2, 64), 4), member((20, 3), 4, blocks=2)], (), newton_schulz_cost, 1 << 20)
    (bucket,) = plan.buckets
    assert all(rank in each.holders for rank, matrices in enumerate(bucket.owned) for each in matrices)
    first, second = find_matrices(0, member((20, 3), 4).cut, 2)
    assert (first.holders, second.holders) == (range(2), range(2, 4))


def test_matrices_of_stacks() -> None:
    by_expert = [*find_matrices(0, member((5, 2, 3), 4).cut, None)]
    assert [(each.stack, each.holders) for each in by_expert] == [
        (range(2), range(1)),
        (range(2, 4), range(1, 2)),
        (range(4, 5), range(2, 3)),
    ]
    cut_along_rows = [*find_matrices(0, member((5, 2, 3), 4, dim=1).cut, None)]
    assert [each.stack for each in cut_along_rows] == [range(i, i + 1) for i in range(5)]
    assert {each.holders for each in cut_along_rows} == {range(2)}
    assert [*find_matrices(0, member((0, 3), 4).cut, None)] == []


def test_runs_have_no_more_than_a_limit() -> None:
    matrices = [each for rows in (5, 1, 1, 1, 9) for each in find_matrices(0, member((rows, 2), 2, dim=1).cut, None)]
    assert [[each.rows for each in run] for run in cut_list(matrices, 6)] == [[5], [1, 1, 1], [9]]


# ---- which parameters it takes


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fused, self.out = nn.Linear(8, 24), nn.Linear(8, 8, bias=False)
        self.norm = nn.LayerNorm(8)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Attention() for _ in range(12))
        self.conv = nn.Conv1d(8, 8, 3)
        self.experts = nn.Parameter(torch.ones(4, 8, 8))
        self.head = nn.Linear(8, 16, bias=False)


def split(model: nn.Module | None = None, **options: Any) -> MatrixSplit:
    return fsdp2.split_matrices(model or Model(), **{"exclude": ("embed", "head"), **options})


TABLE = """\
whole matrices: 25 parameters, 3,328 elements
  1 x experts (4, 8, 8)
  12 x blocks.*.fused.weight (24, 8): blocks of rows: 3
  12 x blocks.*.out.weight (8, 8)
another optimizer: 40 parameters, 936 elements
  1 x embed.weight (16, 8): excluded by 'embed'
  12 x blocks.*.fused.bias (24,): a vector
  12 x blocks.*.norm.weight (8,): a vector
  12 x blocks.*.norm.bias (8,): a vector
  1 x conv.weight (8, 8, 3): a convolution
  1 x conv.bias (8,): a vector
  1 x head.weight (16, 8): excluded by 'head'"""


def test_all_parameters_are_in_one_part_and_printed() -> None:
    model = Model()
    found = split(model, blocks={"blocks.*.fused": 3})
    matrices = [param for group in found.matrices for param in group["params"]]
    assert {*map(id, matrices)} | {*map(id, found.others)} == {*map(id, model.parameters())}
    assert len(matrices) + len(found.others) == len([*model.parameters()])
    assert [group.get("blocks") for group in found.matrices] == [None, 3]
    assert str(found) == TABLE


def test_tied_weights_count_once_and_go_by_either_name() -> None:
    model = Model()
    model.head.weight = model.embed.weight
    for name in ("embed", "head", "head.weight"):
        assert "16, 8" not in str(split(model, exclude=(name,))).partition("another optimizer")[0]
    with pytest.raises(ValueError, match=r"embed\.weight: expected each embedding in `exclude`"):
        split(model, exclude=())
    assert "1 x embed.weight (16, 8)\n" in str(split(model, exclude=(), include=("embed",)))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"exclude": ("embed", "haed")}, r"exclude: 'haed' matches no trainable matrix\. There are: .*head\.weight"),
        ({"exclude": ("embed", "blocks.*.norm")}, r"exclude: 'blocks\.\*\.norm' matches no trainable matrix"),
        ({"include": ("nothing",)}, "include: 'nothing' matches no"),
        ({"blocks": {"fused": 3}}, "blocks: 'fused' matches no"),
        ({"exclude": ()}, r"embed\.weight: expected each embedding in `exclude` \(.*\) or in `include`"),
        ({"include": ("embed",)}, r"embed\.weight: expected one pattern that matches it, got .*exclude.*include"),
        ({"blocks": {"head": 2}}, r"head\.weight: expected one pattern that matches it, got .*exclude.*blocks"),
        ({"blocks": {"*.fused": 5}}, r"blocks\.0\.fused\.weight: blocks: expected a divisor of its 24 rows"),
        ({"blocks": {"*.fused": (8, 8)}}, r"got \(8, 8\) for shape \(24, 8\)"),
        ({"blocks": {"experts": 2}}, r"experts: blocks: .* \(4, 8, 8\)"),
    ],
    ids=str,
)
def test_what_is_unclear_is_an_error(options: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        split(**options)
    with pytest.raises(TypeError, match="exclude: expected a collection of patterns, got the string 'embed'"):
        split(exclude="embed")


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def test_optimizers_are_checked() -> None:
    model = Model()
    found = split(model)
    muon, rest = fsdp2.muon(found.matrices), sgd(found.others)
    found.check(muon, rest)
    found.check(sgd(found.matrices), rest)
    cases: list[tuple[list[Any], str]] = [
        ([muon], r"got in none: embed\.weight, blocks\.0\.fused\.bias, .* and 37 more$"),
        ([muon, sgd([*found.others, model.experts])], "got in two, or in one twice: experts$"),
        ([muon, rest, rest], "got in two, or in one twice: embed"),
        (
            [
                fsdp2.muon([*found.matrices[0]["params"], model.head.weight]),
                sgd([p for p in found.others if p is not model.head.weight]),
            ],
            "got in the whole-matrix one: head.weight$",
        ),
    ]
    without = [p for p in found.matrices[0]["params"] if p is not model.experts]
    cases.append(([fsdp2.muon(without), sgd([*found.others, model.experts])], "got in an elementwise one: experts$"))
    for optimizers, error in cases:
        with pytest.raises(ValueError, match=error):
            found.check(*optimizers)
    model.later = nn.Linear(2, 2, bias=False)
    with pytest.raises(ValueError, match=r"got in none: later\.weight$"):
        found.check(muon, rest)
    model.later.requires_grad_(False)
    found.check(muon, rest)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"lr": -1.0}, "lr: expected a number of at least 0, got -1.0"),
        ({"momentum": -1.0}, "momentum: expected"),
        ({"weight_decay": -1.0}, "weight_decay: expected"),
        ({"ns_steps": 100}, "ns_steps: expected 0 to 99, got 100"),
        ({"ns_coefficients": (1.0, 2.0)}, "ns_coefficients: expected three numbers"),
        ({"adjust_lr_fn": "none"}, "adjust_lr_fn: expected None, 'original'"),
    ],
    ids=str,
)
def test_wrong_arguments(options: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        fsdp2.muon([nn.Parameter(torch.ones(2, 2))], **options)


@pytest.mark.parametrize("bad", [torch.ones(3), torch.ones(2, 2, 2, 2), torch.ones(2, 2, dtype=torch.complex64)])
def test_wrong_parameters(bad: Tensor) -> None:
    with pytest.raises(ValueError, match="weight: expected a matrix, or a stack of matrices, of real numbers"):
        fsdp2.muon([("weight", nn.Parameter(bad))])
    with pytest.raises(TypeError, match="update: expected a function"):
        fsdp2.WholeMatrixOptimizer([nn.Parameter(torch.ones(2, 2))], 3)  # type: ignore[arg-type]
