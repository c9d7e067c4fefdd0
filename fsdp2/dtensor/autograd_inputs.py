"""`loss.backward(inputs=...)` and `torch.autograd.grad(loss, ...)` with sharded parameters.

In the graph of a forward full ones stand for them, so torch finds no path to them: the first does nothing then, without
a word, and so does the second if it is told that some may be unused. `register_multi_grad_hook` would wait for ever.

torch.compile traces what is here; but for that it runs outside of graphs only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .. import torch_compat
from ..core.autograd import leaf_nodes
from ..ext.owners import Owned, all_states, sharded_owner
from .full_tensor import owner_of
from .own_numbers import refuse_own_numbers
from .switches import is_on, switched

_FREED = (
    "in a graph that an earlier backward built (create_graph=True), with another backward and a forward of the model "
    "in between. Call backward through it before that forward, or model.set_keep_unsharded_storage(True) before all."
)


def accept_sharded_inputs() -> None:
    """From now on `backward` computes gradients of sharded parameters among its `inputs`, and `grad` refuses to; and a
    function that waits for the gradients of several of them is called.
    """
    backward, grad = torch.autograd.backward, torch.autograd.grad
    torch.autograd.backward = switched("inputs", backward, _with_full_inputs(backward))
    torch.autograd.grad = switched("inputs", grad, _without_full_inputs(grad))
    torch_compat.find_accumulators_of(_full_of)


def _with_full_inputs(backward: Callable[..., None]) -> Callable[..., None]:
    parameters = signature(backward)

    def backward_of_sharded(*args: Any, **kwargs: Any) -> None:
        if kwargs.get("inputs") is not None or len(args) > len(parameters.parameters) - 1:
            bound = parameters.bind(*args, **kwargs)
            bound.arguments["inputs"] = _add_full(_listed(bound.arguments["inputs"]))
            args, kwargs = bound.args, bound.kwargs
        _refuse_own_numbers(args[0] if args else kwargs.get("tensors", ()))
        try:
            return backward(*args, **kwargs)
        except BaseException as error:
            _clean_up(error, args[0] if args else kwargs.get("tensors", ()))
            raise

    return backward_of_sharded


def _without_full_inputs(grad: Callable[..., Any]) -> Callable[..., Any]:
    def grad_of_sharded(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return grad(outputs, inputs, *args, **kwargs)
        _refuse_full(_listed(outputs), _listed(inputs))
        try:
            return grad(outputs, inputs, *args, **kwargs)
        except BaseException as error:
            _clean_up(error, outputs)
            raise

    return grad_of_sharded


def _refuse_own_numbers(outputs: Any) -> None:
    """Losses that are plain have come by `full_tensor`, which does so itself."""
    for output in _listed(outputs):
        if isinstance(output, DTensor) and not torch.compiler.is_compiling():
            owner = owner_of(output)
            if owner is not None:
                refuse_own_numbers(output, owner)


def _clean_up(error: BaseException, outputs: Any) -> None:
    """A backward has failed: drop what it left half done, now rather than when the next pass begins. Raise a better
    error, if there is one.
    """
    try:
        if isinstance(error, RuntimeError):
            _explain(error, outputs)
    finally:
        for context in dict.fromkeys(state.context for state in all_states()):
            if context.is_of_this_thread():
                context.is_in_backward()


def _explain(error: RuntimeError, outputs: Any) -> None:
    """Raise a better error, if `error` comes of gradients of shards where plain ones belong; or of full parameters that
    were given up: nothing else frees what is used.
    """
    if "mixed torch.Tensor and DTensor" in str(error):
        for owned in _owned(node.variable for node in _leaf_nodes(outputs)):
            raise RuntimeError(
                f"{owned.param.name}: a loss brings together plain tensors and a DTensor that is computed of it "
                "outside its module's forward. Write full_tensor() behind the latter (`loss + penalty.full_tensor()`), "
                "or compute it inside `with fsdp2.full_params(model):`."
            ) from error
    if "storage of size 0" in str(error):
        raise RuntimeError(f"backward has read a full parameter after it was freed: {_FREED}") from error
    if "modified by an inplace operation" in str(error) and any(s.group.versions.is_expired for s in all_states()):
        raise RuntimeError(f"{error} If it is a full parameter, it was freed: {_FREED}") from error


def _listed(given: Any) -> Sequence[Any]:
    if isinstance(given, Tensor):
        return (given,)
    return tuple(given.values() if isinstance(given, Mapping) else given)


def _add_full(inputs: Sequence[Any]) -> list[Any]:
    return [*inputs, *(owned.param.full for owned in _owned(inputs))]


def _refuse_full(outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
    """
    Raises:
        NotImplementedError: the full one of a sharded parameter among `inputs` has part in `outputs`.
    """
    full = {owned.param.full: owned for owned in _owned(inputs)}
    if not full:
        return
    for node in _leaf_nodes(outputs):
        if node.variable in full:
            raise NotImplementedError(
                f"{full[node.variable].param.name}: torch.autograd.grad has no gradients of sharded parameters, which "
                "have to be reduced. To have them in .grad, call backward(inputs=...); or call the model and "
                "torch.autograd.grad inside `with fsdp2.full_params(model) as full:`, and ask for those of `full`."
            )


def _leaf_nodes(outputs: Any) -> Iterator[Any]:
    return leaf_nodes([output.grad_fn for output in _listed(outputs) if isinstance(output, Tensor)])


def _full_of(tensor: Tensor) -> Tensor:
    """What stands in the graph of a forward for `tensor`."""
    if not is_on("inputs"):
        return tensor
    return next((owned.param.full for owned in _owned([tensor])), tensor)


def _owned(inputs: Iterable[Any]) -> Iterator[Owned]:
    for each in inputs:
        if isinstance(each, DTensor) and each.is_leaf and each.requires_grad:
            owned = sharded_owner(each) or sharded_owner(_saved_leaf(each))
            if owned is not None:
                yield owned


def _saved_leaf(tensor: Tensor) -> Tensor:
    """Of which `tensor` is what a graph has saved: another tensor, whose gradients go to the same."""
    with torch.enable_grad():
        view: Any = tensor.view_as(tensor)
    leaf: Tensor = view.grad_fn.next_functions[0][0].variable
    return leaf
