"""Lets `loss.backward(inputs=...)` take sharded parameters, and `torch.autograd.grad(loss, ...)` refuse them.

The graph of a forward has unsharded parameters in their place, so torch finds no path to the sharded ones. The first
function would do nothing then, silently, and so would the second if it is told that some may be unused.
`register_multi_grad_hook` would wait for ever. Both functions enter the engine by one, which is replaced.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..calls.compiled_backward import refuse_compiled_backward
from ..engine.group import FSDPParamGroup
from ..engine.owners import Owned, all_groups, outermost_of_thread, sharded_owner, some_of
from ..parameters.cut_graphs import refuse_loss_of_gradient, without_graph
from ..torch_private.dtensor import wrap_engine
from ..torch_private.internals import compiled_autograd, no_torch_function, records_backward
from .crossings import owner_of, refuse_differing_numbers
from .graph import all_nodes, leaf_nodes
from .sharded_dtensor import replace_attribute
from .summed_parts import parts, refuse_summed_parts

_FREED_GRAPH = (
    "in a graph that an earlier backward built (create_graph=True), with another backward and a forward of the model "
    "in between. Call backward through it before that forward, or model.set_keep_unsharded_storage(True) before all."
)
_SHAPE_READ = re.compile(r"\[torch\.[\w.]+ \[([\d, ]*)\]\]")


def accept_sharded_inputs() -> None:
    """Has `backward` compute gradients of sharded parameters among its `inputs`, and `grad` refuse to.
    Whoever looks for the node that accumulates gradients of a sharded one finds that of the unsharded one, whose hooks
    run: `register_multi_grad_hook`, and users by `param.expand_as(param).grad_fn.next_functions[0][0]`.
    """
    wrap_engine(_entering)
    for name in ("view_as", "expand_as"):
        replace_attribute(name, _leading_to_unsharded)


class _ToUnsharded(torch.autograd.Function):
    """Returns a sharded parameter as it is. The first node behind it is that of the unsharded parameter, and gradients
    go to the sharded one.
    """

    @staticmethod
    def forward(_: Any, unsharded: Tensor, sharded: Tensor) -> Tensor:
        return sharded.detach()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient


def _leading_to_unsharded(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(original)
    def call(self: Tensor, other: Tensor) -> Tensor:
        unsharded = _unsharded_of(self) if self is other and torch.is_grad_enabled() else self
        if unsharded is self:
            return original(self, other)
        with no_torch_function():  # it may be freed
            leading: Tensor = _ToUnsharded.apply(unsharded, self)
        return leading

    return call


def _entering(run: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(run)
    def enter(  # which calls no other, as usual: it runs in each step
        outputs: Any, gradients: Any, retain_graph: Any, create_graph: Any, inputs: Any, *rest: Any, **options: Any
    ) -> Any:
        if torch.compiler.is_compiling():
            return run(outputs, gradients, retain_graph, create_graph, inputs, *rest, **options)
        if inputs:
            _refuse_losses_of_gradients(outputs)
            if options.get("accumulate_grad"):
                inputs = _add_unsharded(inputs)
            else:
                _refuse_sharded(outputs, inputs)
        compiled = compiled_autograd()
        if compiled is not None and records_backward(compiled):
            _refuse_recording(outputs)
        if len(outputs) != 1 or type(outputs[0]) is not Tensor:
            _refuse_differing_numbers(outputs)
        if parts:
            refuse_summed_parts(outputs)
        try:
            return run(outputs, gradients, retain_graph, create_graph, inputs, *rest, **options)
        except BaseException as error:
            _clean_up(error, outputs)
            raise

    return enter


def _refuse_recording(outputs: Any) -> None:
    """Refuses a backward of sharded parameters that compiled autograd would record, with the leaves of its graph, among
    which freed parameters are. What runs without being recorded, Root finds out when backward begins.
    """
    leaves = {id(node.variable) for node in _leaf_nodes(outputs)}
    for group in all_groups():
        for param in group.params:
            if id(param.unsharded) in leaves:
                refuse_compiled_backward(group, param.name)


def _refuse_differing_numbers(outputs: Any) -> None:
    """Refuses losses that are DTensors if their gradients depend on plain numbers that differ between ranks.

    For plain losses `full_tensor` has done that.
    """
    for output in outputs:
        if isinstance(output, DTensor):
            owner = owner_of(output)
            if owner is not None:
                refuse_differing_numbers(output, owner)


def _refuse_losses_of_gradients(outputs: Any) -> None:
    """Refuses losses of `.grad` that has no graph, behind which no input would be found. Backward without inputs comes
    to the node itself.
    """
    if without_graph:
        for node in all_nodes([each.grad_fn for each in outputs if isinstance(each, Tensor)]):
            refuse_loss_of_gradient(node)


def _clean_up(error: BaseException, outputs: Any) -> None:
    """Drops what a failed backward has left half done, now rather than when the next pass begins. Raises a better
    error, if there is one.
    """
    try:
        if isinstance(error, RuntimeError):
            _explain(error, outputs)
    finally:
        for root in [state.built_root for state in outermost_of_thread()]:
            if root is not None:
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
        raise RuntimeError(f"backward has read an unsharded parameter after it was freed: {_FREED_GRAPH}") from error
    expired = [group for group in all_groups() if _is_expired(group)]
    leaves = {id(node.variable) for node in _leaf_nodes(outputs)} if expired else set()
    expired = [group for group in expired if any(id(param.unsharded) in leaves for param in group.params)] or expired
    if "modified by an inplace operation" in str(error) and expired:
        read = _SHAPE_READ.search(str(error))
        sizes = sorted(map(int, read[1].replace(" ", "").split(","))) if read and read[1] else None
        params = [param for group in expired for param in group.params]
        names = some_of([param.name for param in params if sizes in (None, sorted(param.gathered_shape))])
        raise RuntimeError(
            f"{error} If it is an unsharded parameter ({names or 'a part of one'}), it was freed: {_FREED_GRAPH}"
        ) from error


def _is_expired(group: FSDPParamGroup) -> bool:
    """Returns True if autograd refuses what it has saved of the group's unsharded parameters, which were freed."""
    return bool(group.unsharded.is_expired)


def _add_unsharded(inputs: Sequence[Any]) -> tuple[Any, ...]:
    return (*inputs, *(owned.param.unsharded for owned in _owned(inputs)))


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
    return leaf_nodes([output.grad_fn for output in outputs if isinstance(output, Tensor)])


def _unsharded_of(tensor: Tensor) -> Tensor:
    """Returns the unsharded parameter that stands in graphs for a sharded one, and any other tensor as it is."""
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
        view: Any = Tensor.view_as(tensor, tensor)
    leaf: Tensor = view.grad_fn.next_functions[0][0].variable
    return leaf
