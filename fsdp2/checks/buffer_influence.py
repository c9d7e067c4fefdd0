"""Finds out if the output of a model depends on some of its buffers, by following one forward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..calls.nested import tensors_in
from ..torch_private.internals import storage_id
from ..torch_private.rare_internals import TorchDispatchMode


class Influence:
    """Follows, in the next forward of the modules that have some buffers, what is computed from these buffers.

    A module around them is followed in their place if its forward has not begun. Values that Python code reads
    (`item`, a comparison in an `if`) and what compiled code computes are not followed.

    `modules`: the modules to follow, the outermost first. `buffers`: the name of each buffer -> its module and its
    name there.
    """

    def __init__(self, modules: Iterable[nn.Module], buffers: Mapping[str, tuple[nn.Module, str]]) -> None:
        # The names of those on which an output depends.
        self.found: set[str] = set()
        self.has_run = self._runs = False
        self._buffers = {**buffers}
        self._replaced: list[tuple[nn.Module, Any]] = []
        for module in modules:
            self._replaced.append((module, module.__dict__.get("forward")))
            module.__dict__["forward"] = self._followed(module.forward)

    def end(self) -> None:
        """Gives the modules their own forwards back."""
        replaced, self._replaced = self._replaced, []
        for module, own in replaced:
            if own is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = own

    def _followed(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self._runs or not self._replaced:
                return forward(*args, **kwargs)
            self._runs = True
            try:
                with _Follow(self._buffers) as followed:
                    output = forward(*args, **kwargs)
            finally:
                self._runs = False
            self.found |= followed.names_in(output)
            self.has_run = True
            return output

        return run


class _Follow(TorchDispatchMode):
    """Notes which storages hold values that were computed from buffers."""

    def __init__(self, buffers: Mapping[str, tuple[nn.Module, str]]) -> None:
        super().__init__()
        self._buffers = buffers
        # The address of a storage -> the names of the buffers. A storage that is freed leaves its address to another.
        self._names: dict[int, set[str]] = {}
        self._kept: list[Tensor] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to be skipped, dynamo would be imported: seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        names = self._names_of(tensors_in(args, kwargs))
        output = func(*args, **kwargs)
        if names:
            for tensor in tensors_in(output):
                self._names.setdefault(storage_id(tensor), set()).update(names)
                self._kept.append(tensor.detach())
        return output

    def _names_of(self, tensors: Iterable[Tensor]) -> set[str]:
        storages = {storage_id(tensor) for tensor in tensors} - {-1}
        names = {name for storage in storages for name in self._names.get(storage, ())}
        for name, (module, own) in self._buffers.items():  # a forward may put another tensor in its place
            buffer = module._buffers.get(own)
            if buffer is not None and storage_id(buffer) in storages:
                names.add(name)
        return names

    def names_in(self, output: Any) -> set[str]:
        """Returns the names of the buffers on which `output` depends."""
        return self._names_of(tensors_in(output))
