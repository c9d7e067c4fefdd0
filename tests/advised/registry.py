"""Holds the programs for sentences of advice that no situation meets, and what those programs are written with.

A program provokes the error, warning or finding (`refused`, `warned`, `found`), does to the letter what it says, and
then compares numbers with a plain model or with what was expected (`train`, `same`). It claims sentences by a part of
each: `@follows("Call zero_grad, and repeat")`, in which `{}` stands for what the package puts in. Whoever changes a
text changes the claim; a sentence that nobody claims, and a claim of no sentence, fail (`unit/test_advice_texts.py`).
"""

import copy
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp2
from fsdp2 import fully_shard
from helpers import assert_same, full, shard_batch
from models import TanhBlock
from outcomes import is_part

Program = Callable[[], None]
# Programs that follow a sentence, and stand elsewhere, because they need other libraries or another device, or because
# they were there before: a part of the sentence -> the function.
ELSEWHERE: dict[str, str] = {}


@dataclass(frozen=True)
class Entry:
    """Is one program. `claims`: parts of the sentences that it follows. `ranks`: how many run it; 0: it needs none."""

    program: Program
    claims: tuple[str, ...]
    ranks: int

    @property
    def name(self) -> str:
        return self.program.__name__

    def run(self) -> list[str]:
        """Runs it on this rank, and checks that some rank has heard what it claims, and has compared something.

        Returns the texts that ranks have heard.
        """
        heard.clear()
        compared.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.program()
        texts = list(heard)
        if self.ranks:
            everywhere: list[Any] = [None] * self.ranks
            dist.all_gather_object(everywhere, texts)
            texts = [text for of_rank in everywhere for text in of_rank]
        unheard = [claim for claim in self.claims if not any(is_part(claim, text) for text in texts)]
        assert not unheard, f"expected {unheard} in {texts}"
        assert compared, "it has compared nothing"
        return texts


ENTRIES: list[Entry] = []
heard: list[str] = []
compared: list[str] = []


def follows(*claims: str, ranks: int = 2) -> Callable[[Program], Program]:
    def add(program: Program) -> Program:
        ENTRIES.append(Entry(program, claims, ranks))
        return program

    return add


# ---- what programs provoke with


def refused(call: Callable[[], Any], *kinds: type[BaseException]) -> str:
    """Returns the text of the error that `call` raises, with its notes."""
    with pytest.raises(kinds or Exception) as caught:
        call()
    heard.append("\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())]))
    return heard[-1]


def warned(call: Callable[[], Any]) -> Any:
    """Returns what `call` returns; it must warn or log."""
    with _listening() as texts:
        result = call()
    assert texts, "expected a warning, or a line in the log"
    heard.extend(texts)
    return result


def found(findings: Sequence[Any]) -> None:
    """Notes what `fsdp2.check` has found."""
    assert findings, "expected findings"
    heard.extend(map(str, findings))


def none_found(model: Any, *optimizers: Any) -> None:
    findings = [each for each in fsdp2.check(model, *optimizers) if "A note" not in str(each)]
    assert not findings, findings
    compared.append("check")


@contextmanager
def _listening() -> Iterator[list[str]]:
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        logging.getLogger("fsdp2").addHandler(handler)
        try:
            yield texts
        finally:
            logging.getLogger("fsdp2").removeHandler(handler)
            texts += [str(each.message) for each in caught]


def quoted(text: str) -> list[str]:
    """Returns the code in backquotes."""
    return re.findall("`(?:with )?([^`]*?):?`", text)


# ---- models, and what is compared


class Net(nn.Module):
    """Layers of the root's own around a block that is sharded by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block, self.head = nn.Linear(5, 5), TanhBlock(5, 7), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.stem(x)))


def build(make: Callable[[], Any] = Net, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return make()


def shard(model: Any, **options: Any) -> Any:
    if hasattr(model, "block"):
        fully_shard(model.block, **options)
    return fully_shard(model, **options)


def pair(make: Callable[[], Any] = Net, **options: Any) -> tuple[Any, Any]:
    """Returns a sharded model, and the same one plain."""
    plain = build(make)
    return shard(copy.deepcopy(plain), **options), plain


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.5, **options})


def batch(step: int = 0, rows: int = 4) -> Tensor:
    return torch.randn(rows, 5, generator=torch.Generator().manual_seed(step))


def own(x: Tensor) -> Tensor:
    """Returns this rank's rows of a batch."""
    return shard_batch(x, dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else x


def loss_of(output: Tensor) -> Tensor:
    return (output - 0.5).square().mean()


def backward(model: Any, step: int = 0, x: Tensor | None = None) -> None:
    loss_of(model(own(batch(step)) if x is None else x)).backward()


def train(model: Any, plain: Any, steps: int = 2, optimizer: Any = None, tolerance: float = 1e-5) -> None:
    """Trains both, the plain one on whole batches, and compares their parameters."""
    optimizers = (optimizer or sgd(model), sgd(plain) if optimizer is None else like(optimizer, plain))
    for step in range(steps):
        for each, stepper, x in zip((model, plain), optimizers, (own(batch(step)), batch(step)), strict=True):
            loss_of(each(x)).backward()
            stepper.step()
            stepper.zero_grad()
    same_parameters(model, plain, tolerance)


def like(optimizer: Any, plain: Any) -> Any:
    cls = next(each for each in type(optimizer).__mro__ if each.__module__.startswith("torch.optim"))
    defaults = {name: value for name, value in optimizer.defaults.items() if name in ("lr", "momentum", "weight_decay")}
    return cls(plain.parameters(), **defaults)


def same(value: Any, expected: Tensor, name: str = "", tolerance: float = 1e-5) -> None:
    """Compares a tensor, whose parts each rank may hold, with what it must be."""
    assert_same(value, expected, tolerance, tolerance, name)
    compared.append(name)


def same_parameters(model: Any, plain: Any, tolerance: float = 1e-5) -> None:
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        same(param.detach(), expected.detach(), name, tolerance)


def same_gradients(model: Any, plain: Any, tolerance: float = 1e-5) -> None:
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        if expected.grad is None:
            assert param.grad is None, name
        else:
            same(full(param.grad), expected.grad, f"the gradient of {name}", tolerance)
