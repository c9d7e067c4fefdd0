"""Adds CPUs to the platforms that verl knows, as its plug-ins do: an environment variable tells verl to import it."""

import contextlib
from types import SimpleNamespace
from typing import Any

import torch
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import PlatformRegistry


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformCUDA):
    """Says "cpu" where verl asks for the device, and has nothing to wait for or to free."""

    device_name = vendor_name = "cpu"
    device_module: Any = SimpleNamespace(
        empty_cache=lambda: None,
        set_rng_state=torch.set_rng_state,
        memory_allocated=lambda: 0,
        memory_reserved=lambda: 0,
        mem_get_info=lambda: (1, 1),
    )

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def empty_cache(self) -> None:
        pass

    def communication_backend_name(self) -> str:
        return "gloo"

    def nvtx_range(self, msg: str) -> Any:
        return contextlib.nullcontext()

    def is_ipc_supported(self) -> bool:
        return False
