"""Runs a program on a plain model and on ranks of a sharded one, and classifies the outcome of the second.

EXACT: every value that the program shows equals plain training's. LOUD: an error on every rank that names a parameter,
a module or a setting, and says what to do. CRYPTIC: an error that doesn't. SILENT: no error, and other values. HANG: no
end, or only that of the process group's timeout.
"""

import contextlib
import dataclasses
import inspect
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
import torch._dynamo  # as torch's FSDP2 does, in seconds: once, before the forks
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException  # no Exception

import fsdp2
from helpers import RankError, alone, assert_same, end_of_part, full, run_ranks, shard_batch

EXACT, LOUD, CRYPTIC, SILENT, HANG = "EXACT", "LOUD", "CRYPTIC", "SILENT", "HANG"
KINDS = (EXACT, LOUD, CRYPTIC, SILENT, HANG)
LIBRARIES = {"fsdp2": fsdp2, "torch": torch_fsdp}
PATIENCE_S = 10.0

ADVICE = re.compile(
    r"\b(?:must|requires?|need to)\b|(?:^|[.:;,]\s+|\b(?:please|or|and|then|instead) )"
    r"(?:add|apply|assign|build|broadcast|call|change|checkpoint|choose|clear|convert|copy|finish|freeze|give|group|have|initialise"
    r"|initialize|keep|leave|load|make|materialise|materialize|move|pass|put|register|replace|run|set|start|step|store|take|tie|use"
    r"|wrap|write)\b",
    re.IGNORECASE,
)
NO_END = re.compile(r"timed out|timeout|connection (was )?(closed|reset)|broken pipe", re.IGNORECASE)


# What `fully_shard` gets where a program says nothing else.
Options = Callable[[], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Holds how a program ended. `text`: the error, or the value that differed first. `warned`: True if a
    warning came.
    """

    kind: str
    text: str = ""
    warned: bool = False


class Side:
    """Is where a program runs: plainly on whole batches (`library` None), or on one rank, which has its own rows.

    The shown values are full tensors, the same on every side.
    """

    def __init__(
        self, library: ModuleType | None = None, rank: int = 0, num_ranks: int = 1, options: Options = dict
    ) -> None:
        self.library, self.rank, self.num_ranks, self.options = library, rank, num_ranks, options
        self.shown: dict[str, Any] = {}
        self.models: list[nn.Module] = []

    # what programs are written with

    @property
    def is_sharded(self) -> bool:
        return self.library is not None

    def fully_shard(self, module: Any, **options: Any) -> Any:
        if self.library is None:
            return module
        self.models += [module] if isinstance(module, nn.Module) else module
        return self.library.fully_shard(module, **{**self.options(), **options})

    def policy(self, **options: Any) -> Any:
        return (self.library or fsdp2).MixedPrecisionPolicy(**options)

    def batch(self, seed: int, width: int = 5) -> Tensor:
        """Returns this side's rows of batch `seed`."""
        whole = torch.randn(8, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return shard_batch(whole, self.rank, self.num_ranks)

    def parts(self, ranks: int, seed: int) -> list[tuple[int, Tensor]]:
        """Returns (rank, its rows): only its own on a rank, those of all `ranks` on the plain side."""
        if self.is_sharded:
            return [(self.rank, self.batch(seed))]
        return list(enumerate(self.batch(seed).chunk(ranks)))

    def set_sync(self, model: Any, sync: bool) -> None:
        if self.is_sharded:
            model.set_requires_gradient_sync(sync)

    # what programs show

    def value(self, name: str, value: Any) -> None:
        self.shown[name] = full(value).clone() if isinstance(value, Tensor) else value

    def rows(self, name: str, value: Tensor) -> None:
        """Shows a tensor whose dim 0 is the batch."""
        value = value.detach().contiguous()
        if self.is_sharded:
            parts = [torch.empty_like(value) for _ in range(self.num_ranks)]
            dist.all_gather(parts, value)
            value = torch.cat(parts)
        self.value(name, value)

    def weights(self, name: str, model: nn.Module) -> None:
        for fqn, param in model.named_parameters():
            self.value(f"{name}: {fqn}", param)

    def grads(self, name: str, model: nn.Module) -> None:
        for fqn, param in model.named_parameters():
            self.value(f"{name}: {fqn}.grad", param.grad)


Program = Callable[..., None]


@dataclasses.dataclass(frozen=True)
class Situation:
    """A program that a user may write, and how it must end with fsdp2.

    EXACT, or LOUD with a message that has `says` and each of `advises`. Those are parts of sentences of advice in the
    package, in which `{}` stands for anything (`advised/texts.py` finds the sentences). Called with one of `ways`, the
    program does what the message advises, to the letter, and must be EXACT.
    """

    program: Program
    ends: str
    says: str = ""
    ranks: int = 2
    only_ours: bool = False
    tolerance: float = 1e-9
    advises: tuple[str, ...] = ()
    ways: tuple[str, ...] = ()
    follows: str = ""
    """The situation whose advice this one, a program of its own, does: the name of its function."""
    way: str = ""

    @property
    def name(self) -> str:
        return f"{self.program.__name__}, {self.way}" if self.way else self.program.__name__

    @property
    def title(self) -> str:
        return (inspect.getdoc(self.program) or self.name).splitlines()[0].rstrip(".")

    def run(self, side: Side) -> None:
        self.program(side, self.way) if self.way else self.program(side)

    def followed(self) -> "list[Situation]":
        """Returns one situation for each way to do what the message advises."""
        return [
            dataclasses.replace(self, ends=EXACT, says="", advises=(), ways=(), way=way, only_ours=True)
            for way in self.ways
        ]

    def is_said(self, text: str) -> bool:
        return self.says in text and all(is_part(claim, text) for claim in self.advises)


def is_part(claim: str, text: str) -> bool:
    """Returns True if `claim`, in which `{}` stands for anything, is a part of `text`."""
    parts = claim.split("{}")
    if not all(part in text for part in parts):
        return False
    return len(parts) == 1 or re.search(".*?".join(map(re.escape, parts)), text, re.DOTALL) is not None


def run_each(
    ranks: int, runs: Sequence[tuple[Situation, Options]], library: ModuleType, timeout: float
) -> list[list[Outcome]]:
    """Runs each situation of `runs` with its arguments of `fully_shard`, in one launch; returns how each ended on every
    rank.

    Raises:
        RankError: a rank didn't return, or died.
    """

    programs = {situation.name: situation.run for situation, _ in runs}
    shown = alone(lambda: {name: _shown_plainly(program) for name, program in programs.items()})

    def body(rank: int, _: int) -> list[Outcome]:
        outcomes = []
        for situation, options in runs:
            print(f"rank {rank}: {situation.name}", file=sys.stderr, flush=True)  # for the report of a hang
            outcomes.append(_end_of(situation, Side(library, rank, ranks, options), shown[situation.name]))
            end_of_part()
        return outcomes

    by_rank = run_ranks(ranks, body, timeout=timeout)
    return [[own[i] for own in by_rank] for i in range(len(runs))]


def outcome_of(situation: Situation, library: ModuleType, patience_s: float = PATIENCE_S) -> Outcome:
    """Runs a program in its own launch, which is ended after `patience_s`."""
    try:
        (of_ranks,) = run_each(situation.ranks, [(situation, dict)], library, patience_s)
        return merged(of_ranks)
    except RankError as error:
        text = str(error).splitlines()[0]
        return Outcome(HANG if "did not return within" in text else CRYPTIC, text)


def merged(of_ranks: list[Outcome]) -> Outcome:
    """Returns the worst outcome of all ranks, or CRYPTIC if only some of them raised."""
    worst = max(of_ranks, key=lambda outcome: KINDS.index(outcome.kind))
    if worst.kind == LOUD and any(outcome.kind == EXACT for outcome in of_ranks):
        worst = Outcome(CRYPTIC, f"on some ranks only: {worst.text}")
    return dataclasses.replace(worst, warned=any(outcome.warned for outcome in of_ranks))


def _end_of(situation: Situation, side: Side, expected: dict[str, Any]) -> Outcome:
    with _listening() as heard:
        try:
            _run(situation.run, side)
        except (Exception, CheckpointException) as error:
            return _judge(error, side)
    text = _difference(side.shown, expected, situation.tolerance)
    return Outcome(SILENT if text else EXACT, text, bool(heard))


def _shown_plainly(program: Program) -> dict[str, Any]:
    plain = Side()
    _run(program, plain)
    assert plain.shown, "a program must show something"
    return plain.shown


def _run(program: Program, side: Side) -> None:
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        program(side)
    finally:
        torch.set_default_dtype(default)


@contextlib.contextmanager
def _listening() -> Iterator[list[Any]]:
    """Context: collects warnings, in either of the usual ways."""
    heard: list[Any] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = heard.append  # type: ignore[method-assign]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        logging.getLogger().addHandler(handler)
        try:
            yield heard
        finally:
            logging.getLogger().removeHandler(handler)
            heard += caught


def _difference(shown: dict[str, Any], expected: dict[str, Any], tolerance: float) -> str:
    if list(shown) != list(expected):
        return f"expected {list(expected)}, got {list(shown)}"
    for name, value in expected.items():
        try:
            if isinstance(value, Tensor):
                assert_same(shown[name], value, tolerance, tolerance, name)
            else:
                assert shown[name] == value, f"{name}: expected {value!r}, got {shown[name]!r}"
        except AssertionError as error:
            return str(error)
    return ""


def _judge(error: Exception, side: Side) -> Outcome:
    text = f"{type(error).__name__}: {error}"
    if NO_END.search(text):
        return Outcome(HANG, text)
    names = any(re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", text) for name in _names(side))
    return Outcome(LOUD if names and ADVICE.search(text) else CRYPTIC, text)


def _names(side: Side) -> Iterator[str]:
    """Returns what a message may name: FQNs of parameters, buffers and modules, the users' classes, names of
    the API.
    """
    for model in side.models:
        yield from (name for name, _ in (*model.named_parameters(), *model.named_buffers()))
        yield from (name for name, _ in model.named_modules() if "." in name or len(name) > 3)
        yield from (type(module).__name__.removeprefix("FSDP") for module in model.modules())
    library = side.library
    assert library is not None
    yield from ("fsdp2.register_fsdp_forward_method", *inspect.signature(library.fully_shard).parameters)
    yield from (name for name in dir(library.FSDPModule) if not name.startswith("_") and "_" in name)
    yield from (field.name for field in dataclasses.fields(library.MixedPrecisionPolicy))
    yield from ("full_params", "register_fsdp_forward_method", "deepcopy", "full_tensor")
