"""Saves and loads what codecs keep between steps, for checkpoints."""

from ..features.codec_state import load_state_dict, state_dict

__all__ = ["load_state_dict", "state_dict"]
