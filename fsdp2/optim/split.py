"""Divides a model's parameters between an optimizer of whole matrices and another one, and checks that none is lost."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from .cuts import block_sizes
from .whole_matrix import WholeMatrixOptimizer

_WRAPPERS = re.compile(r"\b(_orig_mod|_checkpoint_wrapped_module)\.")
_CONVOLUTIONS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)


class _Row(NamedTuple):
    """One parameter, and where it goes. `reason`: why it is none of the matrices, or ''."""

    names: tuple[str, ...]
    parameter: nn.Parameter
    reason: str
    blocks: int | Sequence[int] | None


@dataclass(frozen=True)
class MatrixSplit:
    """Says which trainable parameters an optimizer of whole matrices takes, and which another one. `str` of it is a
    table, in which numbers in names are counted.

    Args:
        matrices: param groups for `muon` or `WholeMatrixOptimizer`: one, and one more for each kind of `blocks`.
        rest: the other trainable parameters.
    """

    matrices: list[dict[str, Any]]
    rest: list[nn.Parameter]
    _model: nn.Module = field(repr=False)
    _rows: list[_Row] = field(repr=False)

    def __str__(self) -> str:
        lines = []
        for title, wanted in (("whole matrices", True), ("another optimizer", False)):
            rows = [row for row in self._rows if (not row.reason) == wanted]
            counts: dict[tuple[str, str], list[_Row]] = {}
            for row in rows:
                blocks = "" if row.blocks is None else f"blocks of rows: {row.blocks}"
                key = re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "*", row.names[0]), row.reason or blocks
                counts.setdefault((f"{key[0]} {tuple(row.parameter.shape)}", key[1]), []).append(row)
            numel = sum(row.parameter.numel() for row in rows)
            lines.append(f"{title}: {len(rows)} parameters, {numel / 1e6:.3g} M elements")
            for (name, why), found in counts.items():
                lines.append(f"  {len(found)} x {name}{f': {why}' if why else ''}")
        return "\n".join(lines)

    def check(self, *optimizers: Any) -> None:
        """Checks that each trainable parameter of the model is in one of `optimizers`: matrices in one of whole
        matrices, the rest in another. It communicates nothing; call it once the optimizers are built, and again where
        parameters were added or unfrozen.

        Raises:
            TypeError: one of them is no optimizer.
            ValueError: parameters are in none, in two, or in the wrong one, with their names.
        """
        for each in optimizers:
            if not isinstance(each, Optimizer):
                raise TypeError(f"check: expected optimizers, got a {type(each).__name__}")
        names = {id(param): found[0] for param, found in _names(self._model).items() if param.requires_grad}
        homes: dict[int, list[Optimizer]] = {}
        for optimizer in optimizers:
            for param in (each for group in optimizer.param_groups for each in group["params"]):
                if param.requires_grad:
                    homes.setdefault(id(param), []).append(optimizer)
        matrices = {id(row.parameter) for row in self._rows if not row.reason}
        has_whole = any(isinstance(each, WholeMatrixOptimizer) for each in optimizers)
        problems: dict[str, list[str]] = {}
        for key, name in names.items():
            found = homes.pop(key, [])
            if len(found) != 1:
                problems.setdefault("in an optimizer twice, or in two" if found else "in no optimizer", []).append(name)
            elif has_whole and isinstance(found[0], WholeMatrixOptimizer) != (key in matrices):
                kind = "an elementwise" if key in matrices else "the whole-matrix"
                problems.setdefault(f"in {kind} optimizer", []).append(name)
        for found in homes.values():
            problems.setdefault("of an optimizer that the model lacks", []).append(type(found[0]).__name__)
        if problems:
            text = "; ".join(f"{what}: {', '.join(found)}" for what, found in problems.items())
            raise ValueError(
                f"trainable parameters {text}. Give split.matrices to one optimizer, split.rest to another."
            )


def split_matrices(
    model: nn.Module,
    exclude: Collection[str] = (),
    include: Collection[str] = (),
    blocks: Mapping[str, int | Sequence[int]] | None = None,
) -> MatrixSplit:
    """Divides the trainable parameters of a model: matrices for `muon` or `WholeMatrixOptimizer`, and the rest.

    Matrices are all parameters of 2 dimensions, and of 3 (stacks of matrices, such as experts), but for convolutions.
    Nothing is left out by chance: an embedding must be named in `exclude` or `include`, and so should a head be; each
    pattern must match. Print the result to see where each parameter goes, and call its `check` with the optimizers.
    Call it behind `fully_shard`; it communicates nothing.

    A pattern (as of `fnmatch`: `*`, `?`, `[...]`) matches the FQN of a parameter, or of a module that contains it. A
    tied parameter has several FQNs. Prefixes of torch.compile and of checkpoint wrappers are no part of it.

    Args:
        model: a sharded module, or a plain one.
        exclude: patterns of matrices that belong to another optimizer: embeddings and heads, for example.
        include: patterns of embeddings that are matrices nevertheless.
        blocks: pattern -> the blocks of rows that are a matrix each: their number, if they are of equal size, or their
            sizes. For a fused query, key and value: 3, or the sizes of the three; by heads: the number of all heads.

    Raises:
        TypeError: patterns that are one string, or `model` is no module.
        ValueError: a pattern that matches no trainable matrix; one matched by two lists; an embedding that is in none;
            blocks that do not make up a parameter.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got a {type(model).__name__}")
    for option, patterns in (("exclude", exclude), ("include", include)):
        if isinstance(patterns, str):
            raise TypeError(f"{option}: expected a collection of patterns, got the string {patterns!r}")
    blocks, unmatched = blocks or {}, {("exclude", each) for each in exclude} | {("include", each) for each in include}
    unmatched |= {("blocks", each) for each in blocks}
    modules: dict[int, list[type[nn.Module]]] = {}
    for module in model.modules():
        for each in module._parameters.values():
            modules.setdefault(id(each), []).append(type(module))
    rows: list[_Row] = []
    unnamed = []
    for param, names in _names(model).items():
        if not param.requires_grad:
            continue
        classes = modules[id(param)]
        reason = _reason(param, classes)
        own_blocks = None
        if not reason:
            excluded, included, cut = (
                [each for each in patterns if _matches(each, names)] for patterns in (exclude, include, blocks)
            )
            unmatched -= {(name, each) for name, found in _named(excluded, included, cut) for each in found}
            if (excluded and (included or cut)) or len(cut) > 1:
                raise ValueError(
                    f"{names[0]}: matched by {', '.join([*excluded, *included, *cut])}: expected one of them"
                )
            if excluded:
                reason = f"excluded by {excluded[0]!r}"
            elif not included and any(issubclass(each, nn.Embedding | nn.EmbeddingBag) for each in classes):
                unnamed.append(names[0])
            elif cut:
                own_blocks = blocks[cut[0]]
                block_sizes(own_blocks, param.shape, names[0])
        rows.append(_Row(tuple(names), param, reason, own_blocks))
    if unmatched:
        found = "; ".join(f"{option}: {pattern!r}" for option, pattern in sorted(unmatched))
        known = ", ".join(row.names[0] for row in rows if row.parameter.dim() > 1)
        raise ValueError(f"{found} matches no trainable matrix. There are: {known}")
    if unnamed:
        raise ValueError(
            f"{', '.join(unnamed)}: expected each embedding in `exclude` (its rows are no matrix that acts on vectors: "
            "leave it to AdamW, with the head) or in `include`"
        )
    groups: dict[str, dict[str, Any]] = {}
    for row in rows:
        if not row.reason:
            options = {} if row.blocks is None else {"blocks": row.blocks}
            groups.setdefault(repr(row.blocks), {"params": [], **options})["params"].append(row.parameter)
    return MatrixSplit([*groups.values()], [row.parameter for row in rows if row.reason], model, rows)


def _named(excluded: list[str], included: list[str], cut: list[str]) -> list[tuple[str, list[str]]]:
    return [("exclude", excluded), ("include", included), ("blocks", cut)]


def _names(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Returns each parameter -> its FQNs."""
    found: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        found.setdefault(param, []).append(_WRAPPERS.sub("", name))
    return found


def _reason(param: Tensor, classes: Sequence[type[nn.Module]]) -> str:
    """Returns why a parameter is no matrix, or ''."""
    if param.dim() not in (2, 3):
        return f"{param.dim()} dimensions"
    if any(issubclass(each, _CONVOLUTIONS) for each in classes):
        return "a convolution"
    return "" if param.is_floating_point() else str(param.dtype)


def _matches(pattern: str, names: Sequence[str]) -> bool:
    """Returns True if `pattern` matches one of these FQNs, or one of a module around it."""
    paths = (name.split(".") for name in names)
    return any(fnmatchcase(".".join(path[:i]), pattern) for path in paths for i in range(1, len(path) + 1))
