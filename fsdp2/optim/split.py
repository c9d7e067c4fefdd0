"""Divides a model's parameters between an optimizer of whole matrices and another one, and checks that none is lost."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from ..shards.find import fqn_of
from ..shards.tensors import require_module, some_of
from .cuts import block_sizes
from .whole_matrix import WholeMatrixOptimizer

_NUMBERS = re.compile(r"(?<![^.])\d+(?=\.)")
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class _Row(NamedTuple):
    """The optimizer of one trainable parameter. `note`: why, or the blocks of a matrix."""

    name: str
    parameter: nn.Parameter
    is_matrix: bool
    note: str


@dataclass(frozen=True)
class MatrixSplit:
    """The trainable parameters for an optimizer of whole matrices, and those for another one. `str` of it is a
    table, in which the numbers in names are `*`.

    Args:
        matrices: param groups for `muon` or `WholeMatrixOptimizer`: one, and one more for each kind of `blocks`.
        others: the other trainable parameters.
    """

    matrices: list[dict[str, Any]]
    others: list[nn.Parameter]
    _model: nn.Module = field(repr=False)
    _rows: list[_Row] = field(repr=False)

    def __str__(self) -> str:
        lines = []
        for title, wanted in (("whole matrices", True), ("another optimizer", False)):
            rows = [row for row in self._rows if row.is_matrix == wanted]
            numel = sum(row.parameter.numel() for row in rows)
            lines.append(f"{title}: {len(rows)} parameters, {numel:,} elements")
            names = [f"{_NUMBERS.sub('*', row.name)} {tuple(row.parameter.shape)}" for row in rows]
            texts = Counter(f"{name}{row.note and ': '}{row.note}" for name, row in zip(names, rows, strict=True))
            lines += [f"  {count} x {text}" for text, count in texts.items()]
        return "\n".join(lines)

    def check(self, *optimizers: Optimizer) -> None:
        """Checks that each trainable parameter of the model is in one of `optimizers`: matrices in one of whole
        matrices, if there is one of these, and the rest in another. It communicates nothing. Call it once the
        optimizers are built, and again where parameters were added or unfrozen.

        Raises:
            ValueError: parameters are in none, in two, or in the wrong one; with their names.
        """
        names = {id(param): found[0] for param, found in _names(self._model).items() if param.requires_grad}
        matrices = {id(row.parameter) for row in self._rows if row.is_matrix}
        homes: dict[int, list[bool]] = {}
        for optimizer in optimizers:
            for param in (each for group in optimizer.param_groups for each in group["params"]):
                homes.setdefault(id(param), []).append(isinstance(optimizer, WholeMatrixOptimizer))
        has_whole = any(map(any, homes.values()))
        problems: dict[str, list[str]] = {}
        for key, name in names.items():
            found = homes.get(key, [])
            if len(found) != 1:
                problems.setdefault("in two, or in one twice" if found else "in none", []).append(name)
            elif has_whole and found[0] != (key in matrices):
                problems.setdefault(f"in {'the whole-matrix' if found[0] else 'an elementwise'} one", []).append(name)
        if problems:
            text = "; ".join(f"{what}: {some_of(found)}" for what, found in problems.items())
            raise ValueError(f"expected split.matrices in one optimizer and split.others in another; got {text}")


def split_matrices(
    model: nn.Module,
    exclude: Collection[str] = (),
    include: Collection[str] = (),
    blocks: Mapping[str, int | Sequence[int]] | None = None,
) -> MatrixSplit:
    """Divides the trainable parameters of a model: matrices for `muon` or `WholeMatrixOptimizer`, and the rest.

    Matrices are all parameters of 2 dimensions, and of 3 (stacks of matrices, such as experts), but for convolutions.
    Nothing is left out by chance: an embedding must be named in `exclude` or `include`, and a head should be; each
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
        TypeError: an argument: patterns that are one string, for example.
        ValueError: a pattern that matches no trainable matrix; a matrix that is excluded, and matched by another
            pattern; an embedding that none matches; blocks that do not make up a parameter.
    """
    require_module("model", model, "split_matrices")
    blocks = {} if blocks is None else blocks
    if not isinstance(blocks, Mapping):
        raise TypeError(f"blocks: expected a dict of patterns, got {blocks!r}")
    options: dict[str, Collection[str]] = {"exclude": exclude, "include": include, "blocks": blocks}
    for option, patterns in options.items():
        if isinstance(patterns, str):
            raise TypeError(f"{option}: expected a collection of patterns, got the string {patterns!r}")
        if not isinstance(patterns, Collection) or not all(isinstance(each, str) for each in patterns):
            raise TypeError(f"{option}: expected a collection of patterns, got {patterns!r}")
    unmatched = {(option, pattern) for option, patterns in options.items() for pattern in patterns}
    modules: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for each in module._parameters.values():
            modules.setdefault(id(each), []).append(module)
    rows, groups = list[_Row](), dict[str, dict[str, Any]]()
    for param, names in _names(model).items():
        matched = [(option, each) for option in options for each in options[option] if _matches(each, names)]
        note, by = _why_no_matrix(param, modules[id(param)]), dict(matched)
        if not param.requires_grad:
            continue
        if not note:
            unmatched.difference_update(matched)
            if (len(by) > 1 and "exclude" in by) or sum(option == "blocks" for option, _ in matched) > 1:
                raise ValueError(f"{names[0]}: expected one pattern that matches it, got {matched}")
            if not by and any(isinstance(each, _EMBEDDINGS) for each in modules[id(param)]):
                raise ValueError(
                    f"{names[0]}: expected each embedding in `exclude` (a lookup is no product with a matrix: leave it "
                    "to AdamW, with the head) or in `include`"
                )
            note = f"excluded by {by['exclude']!r}" if "exclude" in by else ""
        own = blocks[by["blocks"]] if "blocks" in by and not note else None
        if not note:
            group = groups.setdefault(repr(own), {"params": []} if own is None else {"params": [], "blocks": own})
            group["params"].append(param)
        if own is not None:
            block_sizes(own, param.shape, names[0])
        rows.append(_Row(names[0], param, not note, note if own is None else f"blocks of rows: {own}"))
    if unmatched:
        found = ", ".join(f"{option}: {pattern!r}" for option, pattern in sorted(unmatched))
        known = ", ".join(row.name for row in rows if row.parameter.dim() > 1)
        raise ValueError(f"{found} matches no trainable matrix. There are: {known}")
    return MatrixSplit([*groups.values()], [row.parameter for row in rows if not row.is_matrix], model, rows)


def _names(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Returns each parameter -> its FQNs."""
    found: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        found.setdefault(param, []).append(fqn_of(model, name))
    return found


def _why_no_matrix(param: nn.Parameter, modules: Sequence[nn.Module]) -> str:
    """Returns why a parameter of these modules is no matrix, or ''."""
    if param.dim() not in (2, 3) or not param.is_floating_point():
        return {0: "a scalar", 1: "a vector"}.get(param.dim(), f"{param.dtype} of {param.dim()} dimensions")
    return "a convolution" if any(isinstance(each, _CONVOLUTIONS) for each in modules) else ""


def _matches(pattern: str, names: Sequence[str]) -> bool:
    """Returns True if `pattern` matches one of these FQNs, or one of a module around it."""
    paths = (name.split(".") for name in names)
    return any(fnmatchcase(".".join(path[:i]), pattern) for path in paths for i in range(1, len(path) + 1))
