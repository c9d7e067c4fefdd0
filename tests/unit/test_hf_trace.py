"""Tests how fsdp2.hf follows tensors through functions that cut, join and rearrange them."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp2.hf.trace import Tracer
from fsdp2.hf.views import View


def realize(view: View, tensors: dict[str, Tensor]) -> Tensor:
    """Puts a view together of tensors with values."""
    shape, leaves = view.resolve(lambda name: tensors[name].shape)
    made = torch.full(tuple(shape), -1)
    for leaf in leaves:
        tensor = tensors[leaf.name] if leaf.seen is None else tensors[leaf.name].view(leaf.seen)
        values = leaf.in_tensor(leaf.box).of(tensor, [0] * tensor.dim())
        target = leaf.box.of(made, [0] * len(shape))
        assert bool((target == -1).all()), "no element comes from two places"
        target.copy_(leaf.arrange(values))
    return made


def check(function: Callable[..., Any], *shapes: Sequence[int]) -> None:
    """The views of its results are what it makes of tensors with values; of tensors in files, too."""
    for of_files in (False, True):
        check_views(Tracer(of_files=of_files), function, shapes)


def check_views(tracer: Tracer, function: Callable[..., Any], shapes: Sequence[Sequence[int]]) -> None:
    tensors = [torch.arange(torch.Size(shape).numel()).view(*shape) + 10_000 * i for i, shape in enumerate(shapes)]
    sources = [tracer.source(str(i), shape, torch.int64) for i, shape in enumerate(shapes)]
    with tracer:
        traced = function(*sources)
    expected = function(*tensors)
    for value, found in zip(*(x if isinstance(x, list | tuple) else [x] for x in (expected, traced)), strict=True):
        view = tracer.view_of(found)
        assert isinstance(view, View), view
        assert torch.equal(realize(view, {str(i): tensor for i, tensor in enumerate(tensors)}), value)


EXPERTS = [(4, 6), (4, 6)]
FUNCTIONS: list[tuple[Callable[..., Any], list[tuple[int, ...]]]] = [
    (lambda a, b: torch.cat([torch.stack([a, b]), torch.stack([b, a])], dim=1).contiguous(), EXPERTS),
    (lambda a: [each.squeeze(0) for each in torch.chunk(a, 3, dim=0)], [(3, 1, 4)]),
    (lambda a: torch.unbind(a, 1), [(2, 3, 4)]),
    (lambda a: torch.split(a, [1, 4, 2], dim=-1), [(2, 7)]),
    (lambda a: a.view(2, 2, 2, 3).transpose(1, 2).reshape(8, 3), [(8, 3)]),  # rotations: halves instead of pairs
    (lambda a: a.reshape(2, 3, 2, 2).flatten(1), [(2, 12)]),
    (lambda a: a[:, 1:3].flatten(0, 1), [(3, 4, 2)]),
    (lambda a: a[-2:, ::2].t().contiguous(), [(3, 5)]),
    (lambda a: a.permute(2, 0, 1)[1].unsqueeze(0).clone(), [(2, 3, 4)]),
    (lambda a: a.to("cpu", torch.int64).detach()[None, 2], [(3, 4)]),
]


@pytest.mark.parametrize("i", range(len(FUNCTIONS)))
def test_views_of_results(i: int) -> None:
    function, shapes = FUNCTIONS[i]
    check(function, *shapes)


def test_random_shapes_and_orders() -> None:
    """Including sizes of 1, which come and go."""
    draw = random.Random(0)

    def sizes(numel: int) -> list[int]:
        found = []
        while numel > 1:
            found.append(draw.choice([size for size in range(2, numel + 1) if numel % size == 0]))
            numel //= found[-1]
        for _ in range(draw.randint(0, 2)):
            found.insert(draw.randint(0, len(found)), 1)
        return found or [1]

    for _ in range(200):
        shape = [draw.randint(1, 4) for _ in range(draw.randint(1, 4))]
        first, last = (sizes(torch.Size(shape).numel()) for _ in range(2))
        order = draw.sample(range(len(first)), len(first))
        check(lambda a, f=first, o=order, s=last: a.reshape(f).permute(o).reshape(s), shape)


def test_rows_that_lie_together_are_one_part() -> None:
    """Each part costs a read."""
    tracer = Tracer()
    source = tracer.source("a", (8, 3), torch.float32)
    with tracer:
        view = tracer.view_of(source.view(2, 4, 3).reshape(4, 2, 3).reshape(8, 3))
    assert isinstance(view, View)
    assert len(view.resolve(lambda name: (8, 3))[1]) == 1


@pytest.mark.parametrize(
    ("function", "shape", "most"),
    [
        (lambda a: a.reshape(5, 12), (5, 3, 2, 2), 1),  # a convolution as a linear layer
        (lambda a: a.view(2, 4, 2, 3).transpose(1, 2).reshape(16, 3), (16, 3), 4),  # rotations: two for each head
    ],
)
def test_tensors_in_files_are_seen_as_other_shapes(function: Any, shape: tuple[int, ...], most: int) -> None:
    tracer = Tracer(of_files=True)
    source = tracer.source("a", shape, torch.float32)
    with tracer:
        view = tracer.view_of(function(source))
    assert isinstance(view, View)
    assert len(view.resolve(lambda name: shape)[1]) == most


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda a: a + 1, "aten::add.Tensor"),
        (lambda a: (a * 2).t(), "aten::mul.Tensor"),
        (lambda a: torch.cat([a, a.new_zeros(1, 3)]), "aten::new_zeros"),
        (lambda a: a[[1, 0]], "aten::index.Tensor"),
    ],
)
def test_what_is_computed_is_named(function: Callable[[Tensor], Tensor], name: str) -> None:
    tracer = Tracer()
    source = tracer.source("a", (2, 3), torch.float32)
    with tracer:
        assert tracer.view_of(function(source)) == name
