"""Saves and loads what codecs keep between steps, for checkpoints."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..features import codec_state
from ..features.codec_state import load_state_dict

__all__ = ["load_state_dict", "state_dict"]


def state_dict(model: nn.Module) -> dict[str, Any]:
    """Returns what the codecs of a model keep on this rank; an empty dict if they have not kept anything yet."""
    kept = codec_state.state_dict(model)
    return kept if any(each["summing"] or any(map(_keeps, each["encoders"])) for each in kept.values()) else {}


def _keeps(encoder: dict[str, Any]) -> bool:
    return bool(encoder["calls"] or encoder["residuals"])
