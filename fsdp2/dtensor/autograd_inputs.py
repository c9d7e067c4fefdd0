"""Lets `loss.backward(inputs=...)` take sharded parameters, and `torch.autograd.grad(loss, ...)` refuse them.

The graph of a forward has unsharded parameters in their place, so torch finds no path to the sharded ones. The first
function would do nothing then, silently, and so would the second if it is told that some may be unused.
`register_multi_grad_hook` would wait for ever.

torch.compile traces these functions; inside them the engine runs outside of graphs only.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..engine.gradients import refuse_loss_of_gradient, without_graph
from ..engine.owners import Owned, all_groups, sharded_owner, some_of
from ..engine.torch_names import find_accumulators_of
from ..engine.unsharded_versions import UnshardedVersions
from .crossings import owner_of
from .differing_numbers import refuse_differing_numbers
from .graph import all_nodes, leaf_nodes
from .summed_parts import average_summed_parts, parts
from .switches import is_on, off, switched

_FREED_GRAPH = (
    "in a graph that an earlier backward built (create_graph=True), with another backward and a forward of the model "
    "in between. Call backward through it before that forward, or model.set_keep_unsharded_storage(True) before all."
)


_UNSEEN = (
    "by a way to the loss that does not lead through an output of its module. Without saved-tensor hooks, a module is "
    "gathered in backward only when that comes to its output. Return from the module's forward what the loss is "
    "computed of; or leave saved-tensor hooks on: call model.set_saved_tensor_hooks(True) before the forward."
)
_SHAPE_READ = re.compile(r"\[torch\.[\w.]+ \[([\d, ]*)\]\]")


def accept_sharded_inputs() -> None:
    """Has `backward` compute gradients of sharded parameters among its `inputs`, and `grad` refuse to; and has
    functions that wait for the gradients of several of them called.
    """
    backward, grad = torch.autograd.backward, torch.autograd.grad
    torch.autograd.backward = _with_unsharded_inputs(backward)
    torch.autograd.grad = switched("inputs", grad, _without_sharded_inputs(grad))
    find_accumulators_of(_unsharded_of)


def _with_unsharded_inputs(backward: Callable[..., None]) -> Callable[..., None]:
    parameters = signature(backward)

    @wraps(backward)
    def backward_of_sharded(*args: Any, **kwargs: Any) -> None:  # which calls no other, as usual: it runs in each step
        if "inputs" in off:
            return backward(*args, **kwargs)
        if kwargs.get("inputs") is not None or len(args) > len(parameters.parameters) - 1:
            bound = parameters.bind(*args, **kwargs)
            bound.arguments["inputs"] = _add_unsharded(_listed(bound.arguments["inputs"]))
            args, kwargs = bound.args, bound.kwargs
            _refuse_losses_of_gradients(bound.arguments["tensors"])
        outputs = args[0] if args else kwargs.get("tensors", ())
        if type(outputs) is not Tensor:
            _refuse_differing_numbers(outputs)
        hooks = average_summed_parts(_listed(outputs)) if parts and not torch.compiler.is_compiling() else ()
        try:
            return backward(*args, **kwargs)
        except BaseException as error:
            _clean_up(error, outputs)
            raise
        finally:
            for each in hooks:
                each.remove()

    return backward_of_sharded


def _without_sharded_inputs(grad: Callable[..., Any]) -> Callable[..., Any]:
    def grad_of_sharded(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return grad(outputs, inputs, *args, **kwargs)
        _refuse_losses_of_gradients(outputs)
        _refuse_sharded(_listed(outputs), _listed(inputs))
        hooks = average_summed_parts(_listed(outputs)) if parts else ()
        try:
            return grad(outputs, inputs, *args, **kwargs)
        except BaseException as error:
            _clean_up(error, outputs)
            raise
        finally:
            for each in hooks:
                each.remove()

    return grad_of_sharded


def _refuse_differing_numbers(outputs: Any) -> None:
    """Refuses losses that are DTensors if their gradients depend on plain numbers that differ between ranks.

    For plain losses `full_tensor` has done that.
    """
    for output in _listed(outputs):
        if isinstance(output, DTensor) and not torch.compiler.is_compiling():
            owner = owner_of(output)
            if owner is not None:
                refuse_differing_numbers(output, owner)


def _refuse_losses_of_gradients(outputs: Any) -> None:
    """Refuses losses of `.grad` that has no graph, behind which no input would be found. Backward without inputs comes
    to the node itself.
    """
    if without_graph:
        for node in all_nodes([each.grad_fn for each in _listed(outputs) if isinstance(each, Tensor)]):
            refuse_loss_of_gradient(node)


def _clean_up(error: BaseException, outputs: Any) -> None:
    """Drops what a failed backward has left half done, now rather than when the next pass begins. Raises a better
    error, if there is one.
    """
    try:
        if isinstance(error, RuntimeError):
            _explain(error, outputs)
    finally:
        for root in dict.fromkeys(group.root for group in all_groups()):
            if root.forward.thread == threading.get_ident():
                root.is_in_backward()


def _explain(error: RuntimeError, outputs: Any) -> None:
    """Raises a better error, if `error` comes of gradients of shards where plain ones belong; or of unsharded
    parameters that were freed: nothing else frees what is used.
    """
    if "mixed torch.Tensor and DTensor" in str(error):
        for owned in _owned(node.variable for node in _leaf_nodes(outputs)):
            raise RuntimeError(
                f"{owned.param.name}: a loss brings together plain tensors and a DTensor that is computed from it "
                "outside its module's forward. Write full_tensor() behind the latter (`loss + penalty.full_tensor()`), "
                "or compute it inside `with fsdp2.full_params(model):`."
            ) from error
    if "storage of size 0" in str(error):
        why = _why_freed(all_groups())
        raise RuntimeError(f"backward has read an unsharded parameter after it was freed: {why}") from error
    expired = [group for group in all_groups() if _is_expired(group)]
    leaves = {id(node.variable) for node in _leaf_nodes(outputs)} if expired else set()
    expired = [group for group in expired if any(id(param.unsharded) in leaves for param in group.params)] or expired
    if "modified by an inplace operation" in str(error) and expired:
        read = _SHAPE_READ.search(str(error))
        sizes = sorted(map(int, read[1].replace(" ", "").split(","))) if read and read[1] else None
        params = [param for group in expired for param in group.params]
        names = some_of([param.name for param in params if sizes in (None, sorted(param.gathered_shape))])
        raise RuntimeError(
            f"{error} If it is an unsharded parameter ({names or 'a part of one'}), it was freed: {_why_freed(expired)}"
        ) from error


def _why_freed(groups: Iterable[Any]) -> str:
    has_hooks = all(group.root.settings.saved_tensor_hooks for group in groups)
    return _FREED_GRAPH if has_hooks else _UNSEEN


def _is_expired(group: Any) -> bool:
    """Returns True if autograd refuses what it has saved of the group's unsharded parameters, which were freed."""
    versions = group.root.events.of(UnshardedVersions)
    return versions is not None and versions.of(group).is_expired


def _listed(given: Any) -> Sequence[Any]:
    if isinstance(given, Tensor):
        return (given,)
    return tuple(given.values() if isinstance(given, Mapping) else given)


def _add_unsharded(inputs: Sequence[Any]) -> list[Any]:
    return [*inputs, *(owned.param.unsharded for owned in _owned(inputs))]


def _refuse_sharded(outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
    """Refuses gradients of sharded parameters among `inputs` whose unsharded parameters have part in `outputs`.

    Raises:
        NotImplementedError: there is one.
    """
    unsharded = {owned.param.unsharded: owned for owned in _owned(inputs)}
    if not unsharded:
        return
    for node in _leaf_nodes(outputs):
        if node.variable in unsharded:
            raise NotImplementedError(
                f"{unsharded[node.variable].param.name}: torch.autograd.grad has no gradients of sharded parameters, "
                "which have to be reduced. To have them in .grad, call backward(inputs=...); or call the model and "
                "torch.autograd.grad inside `with fsdp2.full_params(model) as full:`, and ask for those of `full`."
            )


def _leaf_nodes(outputs: Any) -> Iterator[Any]:
    return leaf_nodes([output.grad_fn for output in _listed(outputs) if isinstance(output, Tensor)])


def _unsharded_of(tensor: Tensor) -> Tensor:
    """Returns the unsharded parameter that stands in graphs for a sharded one, and any other tensor as it is."""
    if not is_on("inputs"):
        return tensor
    return next((owned.param.unsharded for owned in _owned([tensor])), tensor)


def _owned(inputs: Iterable[Any]) -> Iterator[Owned]:
    for each in inputs:
        if isinstance(each, DTensor) and each.is_leaf and each.requires_grad:
            owned = sharded_owner(each) or sharded_owner(_saved_leaf(each))
            if owned is not None:
                yield owned


def _saved_leaf(tensor: Tensor) -> Tensor:
    """Returns the leaf that gets the gradients of `tensor`, which a graph has saved in place of the leaf."""
    with torch.enable_grad():
        view: Any = tensor.view_as(tensor)
    leaf: Tensor = view.grad_fn.next_functions[0][0].variable
    return leaf
