"""Provides a device that is not the CPU, for ranks without a GPU: see README.md. `install` adds it to a forked rank."""

import sys
import types
from typing import Any

import torch
import torch.distributed as dist

from .build import built, load

KIND = "fakegpu"
BACKEND = "fakeccl"

__all__ = ["BACKEND", "KIND", "built", "install", "native", "start_clocks", "take_problems"]


def native() -> Any:
    """The compiled module, after `install`."""
    return sys.modules["fake_gpu_native"]


def install(device: int = 0) -> None:
    """Makes the device, and its backend for process groups, known to torch in this process, for good.

    `device`: the current one of this thread. Other threads begin at 0, as CUDA's do.
    """
    torch.utils.rename_privateuse1_backend(KIND)
    module = load()
    functions: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: 2,
        "current_device": module.current_device,
        "set_device": lambda device: module.set_device(torch.device(KIND, device).index),
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda *_: torch.get_rng_state(),  # its random numbers are the CPU's
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "Stream": torch.Stream,
        "Event": torch.Event,
    }
    device_module = types.ModuleType(f"torch.{KIND}")
    device_module.__dict__.update(functions)
    torch._register_device_module(KIND, device_module)
    module.set_device(device)
    dist.Backend.register_backend(BACKEND, _new_backend, devices=[KIND])


def _new_backend(store: Any, rank: int, size: int, timeout: Any) -> Any:
    gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
    device = native().current_device()
    return native().FakeBackend(gloo, device, torch.Stream(torch.device(KIND, device)).stream_id)


def start_clocks() -> None:
    """From now on the clocks judge what this process does."""
    native().start_clocks(_place)


def take_problems() -> list[str]:
    """The problems that the clocks have found since the last call, each once."""
    return list(dict.fromkeys(native().take_problems()))


def _place() -> str:
    """Up to three lines of fsdp2 that run in this thread, innermost first; else "user"."""
    frame, places = sys._getframe(), []
    # Each operation asks. What called the rank, which is most of the stack, has no line of fsdp2.
    while frame is not None and len(places) < 3 and frame.f_code.co_name != "_run_in_group":
        _, in_package, file = frame.f_code.co_filename.rpartition("/fsdp2/")
        if in_package:
            places.append(f"{file}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(places) or "user"
