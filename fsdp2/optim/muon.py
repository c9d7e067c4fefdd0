"""Muon: momentum whose whole matrices are made orthogonal by Newton-Schulz iterations."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .whole_matrix import BUCKET_BYTES, WholeMatrixOptimizer, check_number


def muon(
    params: Any,
    lr: float | Tensor = 1e-3,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
    eps: float = 1e-7,
    ns_steps: int = 5,
    adjust_lr_fn: str | None = None,
    *,
    batched: bool | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    offload_states: bool = False,
) -> WholeMatrixOptimizer:
    """Returns an optimizer that is Muon, with the arguments and numbers of `torch.optim.Muon`, for sharded parameters.

    Each matrix is made orthogonal by one rank, see `WholeMatrixOptimizer`; torch's own gathers each matrix, and
    computes it, on every rank. Matrices travel in bf16, as which the iterations begin and end, so that nothing is
    rounded more often than by torch. On a CPU, fp32 parameters get the bits of torch's Muon on one process, however
    many ranks there are; bf16 parameters may differ in the last bit, because torch's kernel rounds the elements at the
    end of a shard otherwise. Where matrices are updated in batches, the iterations may round some element otherwise.

    The formulas are those of `torch.optim.Muon`, after Keller Jordan (https://kellerjordan.github.io/posts/muon/) and
    "Muon is Scalable for LLM Training" (arXiv 2502.16982).

    Args:
        params: see `WholeMatrixOptimizer`. Embeddings, heads, vectors and convolutions belong to another optimizer.
        lr: learning rate.
        weight_decay: of the parameters, times `lr`, apart from the gradient.
        momentum: of the running mean of gradients.
        nesterov: step along the gradient and the buffer, not along the buffer alone.
        ns_coefficients: a, b and c of the iteration X <- a X + b (X X') X + c (X X')^2 X.
        eps: the least norm that a matrix is divided by.
        ns_steps: the number of iterations, below 100.
        adjust_lr_fn: "original" (None) takes `lr` times sqrt(max(1, rows / columns)); "match_rms_adamw" takes `lr`
            times 0.2 sqrt(max(rows, columns)), with which learning rate and weight decay of AdamW fit.
        batched, bucket_bytes, offload_states: see `WholeMatrixOptimizer`.

    Raises:
        ValueError: an argument out of its range.
        TypeError, NotImplementedError: see `WholeMatrixOptimizer`.
    """
    if adjust_lr_fn not in (None, "original", "match_rms_adamw"):
        raise ValueError(f"adjust_lr_fn: expected None, 'original' or 'match_rms_adamw', got {adjust_lr_fn!r}")
    if isinstance(ns_steps, bool) or not isinstance(ns_steps, int):
        raise TypeError(f"ns_steps: expected an int, got {ns_steps!r}")
    check_number("eps", eps)
    if not 0 <= ns_steps < 100:
        raise ValueError(f"ns_steps: expected 0 to 99, got {ns_steps}")
    if not isinstance(ns_coefficients, tuple | list):
        raise TypeError(f"ns_coefficients: expected three numbers, got {ns_coefficients!r}")
    if len(ns_coefficients) != 3:
        raise ValueError(f"ns_coefficients: expected three numbers, got {ns_coefficients}")
    rule = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
    iterations = {"ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
    how = {
        "compute_dtype": torch.bfloat16,
        "batched": batched,
        "bucket_bytes": bucket_bytes,
        "offload_states": offload_states,
    }
    options: dict[str, Any] = {**rule, **iterations, **how}
    return WholeMatrixOptimizer(params, orthogonalize, learning_rate=adjusted_learning_rate, **options)


def orthogonalize(matrices: Tensor, group: dict[str, Any]) -> Tensor:
    """Returns matrices [matrices, rows, columns] in bf16 whose singular values are near 1, by Newton-Schulz iterations
    with the options of a param group.
    """
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    a, b, c = group["ns_coefficients"]
    x = matrices.bfloat16()
    x = x.mT if is_tall else x
    norms = torch.stack([each.norm() for each in x]).clamp(min=group["eps"])
    x = x / norms[:, None, None]
    is_single = len(x) == 1  # the operations of torch's Muon, and their bits
    x, add_product = (x[0], torch.addmm) if is_single else (x, torch.baddbmm)
    for _ in range(group["ns_steps"]):
        gram = x @ x.mT
        x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x[None] if is_single else x
    return x.mT if is_tall else x


def adjusted_learning_rate(group: dict[str, Any], rows: int, cols: int) -> float:
    """Returns the learning rate of a param group for a matrix of that shape."""
    ratio = math.sqrt(max(1, rows / cols))
    if group["adjust_lr_fn"] == "match_rms_adamw":
        ratio = 0.2 * math.sqrt(max(rows, cols))
    return float(group["lr"]) * ratio
