"""Saves and loads what codecs keep between steps: what encoding has changed, matrices of PowerSGD, random numbers."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..engine.group import FSDPParamGroup
from ..engine.state import groups_below


def state_dict(model: nn.Module) -> dict[str, Any]:
    """Returns what the codecs of `model` keep between steps on this rank, as copies on the CPU.

    That is what encoding has changed (codecs with feedback, PowerSGD), matrices and counts of PowerSGD, and the number
    from which rounding at random goes on. It is this rank's own, and not a part of `model.state_dict()`:
    `fsdp2.checkpoint.save` saves it for each rank. A hook of `register_comm_hook` keeps its state itself. It does not
    communicate. Call it between steps.

    Returns:
        A dict of numbers, texts and tensors, for `torch.save`.

    Raises:
        RuntimeError: during a backward pass.
    """
    return {
        group.params[0].name: {**_description(group), **group.gradients.codecs.kept_state()}
        for group in _groups_of(model)
    }


def load_state_dict(model: nn.Module, state: dict[str, Any]) -> None:
    """Takes what `state_dict` has returned, in place of what the codecs of `model` keep.

    Training then goes on with the bits of a run that was not interrupted. Call it on every rank, with what this rank
    has saved, behind loading weights.

    Args:
        state: what `state_dict` has returned, on the same rank of as many, for a model that is sharded alike, with the
            same codecs. With other ranks, leave it out: codecs begin anew.

    Raises:
        ValueError: it was saved for other groups, parameters, ranks or codecs. Nothing is changed then.
        RuntimeError: during a backward pass.
    """
    groups = _groups_of(model)
    names = [group.params[0].name for group in groups]
    if names != [*state]:
        raise ValueError(
            f"codecs: expected what codecs have kept of groups that begin with {names}, got that of "
            f"{[*state]}. Shard the model as it was when this was saved; or leave it out: codecs then begin anew."
        )
    for group in groups:
        group.adopt_replacements()  # else the next forward would, and drop what was loaded
        _check(group, state[group.params[0].name])
    for group in groups:
        group.gradients.codecs.load_kept(state[group.params[0].name], group.params[0].unsharded.device)


def _description(group: FSDPParamGroup) -> dict[str, Any]:
    """Returns the parameters, ranks and codecs that the state of a group holds for."""
    comms = group.comms.reduces, group.comms.replicas
    return {
        "parameters": [
            (param.name, spec.shard_numel) for param, spec in zip(group.params, group.gradients.specs, strict=True)
        ],
        "ranks": [(comm.rank, comm.size) for comm in comms if comm is not None],
        **group.gradients.codecs.description(),
    }


def _check(group: FSDPParamGroup, state: dict[str, Any]) -> None:
    """Raises ValueError unless `state` holds for this group."""
    for what, here in _description(group).items():
        if here != state[what]:
            raise ValueError(
                f"{group}: expected what codecs have kept of the {what} {here}, got that of {state[what]}. "
                "Load on each rank what it has saved, with the same policies on as many ranks; or leave it out: "
                "codecs then begin anew."
            )


def _groups_of(model: nn.Module) -> list[FSDPParamGroup]:
    groups = [group for group in groups_below(model) if group.params]
    for root in {id(group.root): group.root for group in groups}.values():
        if root.is_in_backward():
            raise RuntimeError("fsdp2.checkpoint: call save and load between steps, not during a backward")
    return groups
