"""Saves and restores the random states of a rank: Python's, NumPy's, torch's, and that of its device."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch


class RandomStates:
    """The random states of this rank, for `per_rank=` of `save` and `load`.

    They are those of Python's `random`, of NumPy if the program has imported it, of torch on the CPU, and of the
    current device of the accelerator if there is one. A seed that an optimizer or a module keeps by itself is not
    among them.
    """

    def state_dict(self) -> dict[str, Any]:
        """Returns the random states, as numbers, lists and tensors."""
        state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        if (numpy := sys.modules.get("numpy")) is not None:
            kind, keys, *rest = numpy.random.get_state()
            state["numpy"] = (str(kind), [int(key) for key in keys], *rest)
        if (device := _device_module()) is not None:
            state["device"] = device.get_rng_state()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` has returned. What this process lacks, NumPy or a device, is left out."""
        version, numbers, gauss = state["python"]
        random.setstate((version, tuple(numbers), gauss))
        torch.set_rng_state(state["torch"])
        if "numpy" in state and (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.set_state(state["numpy"])
        if "device" in state and (device := _device_module()) is not None:
            device.set_rng_state(state["device"])


def _device_module() -> Any:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return None if accelerator is None else torch.get_device_module(accelerator)
