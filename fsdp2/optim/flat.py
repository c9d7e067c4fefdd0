"""`flatten_optimizer`: an optimizer of sharded parameters steps on one tensor for many of them."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..shards.tensors import check_bool, no_torch_function, once
from ..torch_private import optimizers as internals
from .late import LateParts
from .probe import NotElementwiseError
from .resting import BUCKET_BYTES, check_bucket_bytes, load_to_rest
from .steps import FlatSteps, NotCapturableError

_STEPS = "_fsdp2_flat_steps"
AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


def flatten_optimizer(
    optimizer: AnyOptimizer,
    *,
    overlap_with_forward: bool = False,
    offload_states: bool = False,
    bucket_bytes: int = BUCKET_BYTES,
) -> AnyOptimizer:
    """Has an optimizer of sharded parameters step on one flat tensor in place of many; returns it.

    Parameters of one fully_shard call lie side by side in memory, with their gradients. Where several have the same
    dtype and the same entry in `param_groups`, an optimizer that computes element by element (all of torch's but
    Adafactor, LBFGS, Muon and SparseAdam) needs one step for all. The more parameters there are, and the smaller this
    rank's parts of them, the more host time and launches that saves; where the elements take the time, it saves
    nothing.

    Parameters, gradients and state get the same bits as without, on each rank. Nothing else changes either:
    `param_groups` lists the parameters, learning rates and other options may change at any time, hooks run once in each
    step, and schedulers, `GradScaler`, closures, `zero_grad`, `add_param_group` and `set_optimizer_in_backward` work as
    before. Parameters without a gradient do not move. Those that are not sharded by fsdp2 are stepped on beside, one by
    one. `state` and `state_dict()` hold a DTensor for each parameter, over the memory of the flat state, and
    checkpoints are those of the ordinary optimizer: each loads the other's, on any number of ranks. A copy
    (`copy.deepcopy`) is flat, too; what is pickled is an ordinary optimizer.

    Parameters that have taken another number of steps than their neighbours, because they were frozen or unused for a
    while, are stepped on apart from these from then on. The fused kernels of the CPU (`fused=True`) compute the last
    elements of a tensor by other instructions than the rest: there each parameter stays a tensor of its own, and one
    call of the kernel steps on all. So does, for the same reason, each 16-bit parameter on the CPU.

    Every rank may call this by itself: it communicates nothing, and neither does a step.

    With `offload_states=True` the states of parameters on a device (moments; not counts of steps) rest in page-locked
    memory of the CPU, while parameters and gradients stay on the device. A step brings them in buckets, steps on each,
    and sends it back: while one is stepped on, the one before returns, and the next one comes in its place. So the
    device has two buckets of states during a step, and none between steps. A step copies the bytes of the states once
    in each direction, which no computation hides: it takes at least their bytes divided by the speed of one direction
    of the link. The host waits at its end until the states have returned. The first step, which makes the states, has
    one bucket of them on the device. The bits are those of states on the device. States of parameters that rest on the
    CPU (`CPUOffloadPolicy`) are there already, and those of parameters that are stepped on beside, one by one, stay on
    the device. `load_state_dict` leaves the states of sharded state dicts on the CPU. After an error in a step, each
    state is what the step had made of it by then. `set_optimizer_in_backward` works, but backward then waits for the
    copies.

    Args:
        optimizer: of torch.optim, or any other that computes element by element. What its class does in `step` is
            called with flat tensors in `param_groups` and `state`, without a closure or with one that returns the loss
            that is known by then. With `overlap_with_forward` or `offload_states`, one of torch.optim's own classes.
        overlap_with_forward: step group by group, in the order of forward, on a stream beside: a group's all-gather
            waits for the step on that group only, and forward computes while the other groups are stepped on. The bits
            are the same. It is for devices, and for one optimizer of a model; on CPUs, steps are in the usual order.
            Whatever reads parameters, gradients or states between the step and the next forward makes the host wait,
            and gets the new values; the next steps then are in the usual order, since the program may read after each.
            So are steps with a loss scaler, and with options that are tensors.
        offload_states: the states rest on the CPU, see above.
        bucket_bytes: the bytes of a bucket of states, if it has more than one parameter's.

    Raises:
        TypeError: an argument of the wrong type; it is no optimizer; its step works on whole tensors, which a trial on
            some numbers has shown; it needs a closure; `overlap_with_forward` or `offload_states`, and a class that is
            not torch's own.
        ValueError: it keeps parameters elsewhere than in `param_groups`, is differentiable, or has got another `step`
            than its class has; it is flat already, with other arguments; `offload_states`, and `capturable=True`;
            `bucket_bytes` that are not positive.
    """
    for name, value in (("overlap_with_forward", overlap_with_forward), ("offload_states", offload_states)):
        check_bool(name, value)
    check_bucket_bytes("bucket_bytes", bucket_bytes)
    if overlap_with_forward and offload_states:
        raise ValueError(
            "overlap_with_forward, offload_states: expected one of them at most: the host waits at the end of a step "
            "until the states have returned to the CPU. Leave one of them out."
        )
    chosen = bucket_bytes if offload_states else None
    cls: type[Optimizer] = type(optimizer)
    if not issubclass(cls, Optimizer):
        raise TypeError(f"optimizer: expected a torch.optim.Optimizer, got a {cls.__name__}")
    is_flat = issubclass(cls, FlatOptimizer)
    own = cls.__mro__[2] if is_flat else cls  # see _flat_class
    if (overlap_with_forward or offload_states) and not own.__module__.startswith("torch.optim."):
        name, why = ("offload_states", "bucket of states") if offload_states else ("overlap_with_forward", "group")
        raise TypeError(
            f"{own.__module__}.{own.__qualname__}: {name} calls its step once for each {why}, and a class that is not "
            f"torch's own may count these calls. Call flatten_optimizer without {name}."
        )
    if not is_flat:
        _refuse_what_cannot_be(optimizer)
        _make_flat(optimizer, cls, chosen)
    elif vars(optimizer)[_STEPS].bucket_bytes != chosen:
        stay = "do not stay" if chosen is None else "stay"
        raise ValueError(
            f"{cls.__name__} is flat already, and its states {stay} on the device. Call flatten_optimizer once, with "
            "the arguments that you want."
        )
    if overlap_with_forward:
        _step_beside(optimizer)
    return optimizer


def _step_beside(optimizer: Any) -> None:
    vars(optimizer)[_STEPS].late = LateParts()


def _make_flat(optimizer: Optimizer, cls: type[Optimizer], bucket_bytes: int | None) -> None:
    try:
        steps = FlatSteps(optimizer, cls, bucket_bytes)
    except NotCapturableError as error:
        raise ValueError(_capturable(cls)) from error
    except NotElementwiseError as error:
        raise TypeError(_advice(cls, error)) from error
    shown = vars(optimizer).pop("state")
    optimizer.__class__ = _flat_class(cls)
    steps.absorb(shown)
    vars(optimizer)[_STEPS] = steps
    if not internals.follow_step_of_class(optimizer):
        raise AssertionError("it was asked before")


def _capturable(cls: type[Optimizer]) -> str:
    return f"{cls.__name__}(capturable=True): a graph can't wait for states that rest on the CPU. Leave capturable out."


def _advice(cls: type[Optimizer], error: Exception) -> str:
    name = cls.__name__
    more = " For whole matrices fsdp2 has an optimizer of its own." if name == "Muon" else ""
    if not cls.__module__.startswith("torch.optim."):
        more = " Or have it step on this rank's shards, as examples/guides/lora.md shows."
    return (
        f"{name} can't step on many parameters as one flat tensor: {error.args[0]}. flatten_optimizer is for "
        f"optimizers that compute each element by itself, as SGD and AdamW do. Use {name} as it is; or, if its own "
        f"step takes no DTensors, another optimizer.{more}"
    )


def _refuse_what_cannot_be(optimizer: Optimizer) -> None:
    """Raises ValueError, or TypeError, with what to do instead."""
    name = type(optimizer).__name__
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            f"{name} calls its closure as often as it likes, between steps on whole tensors: it can't be flat. Use "
            f"{name} as it is."
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError(f"{name}(differentiable=True) can't be flat: flat tensors have no graph. Use it as it is.")
    params = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for attribute, value in vars(optimizer).items():
        if attribute in ("state", "param_groups", "defaults"):
            continue
        if isinstance(value, Optimizer):
            raise ValueError(f"{name}.{attribute} is an optimizer of its own: flatten that one.")
        held = [*value.values()] if isinstance(value, dict) else value if isinstance(value, list | tuple) else []
        if any(isinstance(each, Tensor) and id(each) in params for each in held):
            raise ValueError(f"{name} keeps parameters in {attribute!r}, too: it can't be flat. Use {name} as it is.")
    own = vars(optimizer).get("step")
    if own is not None and not hasattr(own, "_wrapped_by_lr_sched"):
        raise ValueError(f"{name}.step was replaced in this optimizer: call flatten_optimizer before that.")


class FlatOptimizer:
    """The base of flat optimizers' classes, before the optimizer's own class.

    `counts_own_steps`: a step counts itself in the versions of the parameters.
    """

    counts_own_steps = True

    @property
    def overlaps_forward(self) -> bool:
        """True if a step may still run when it returns."""
        return vars(self)[_STEPS].late is not None

    @property
    def offload_states(self) -> bool:
        """True if the states rest on the CPU between steps."""
        return vars(self)[_STEPS].bucket_bytes is not None


@once
def _flat_class(cls: type[Optimizer]) -> type[Optimizer]:
    """Returns the class of flat optimizers of a class: of the same name, and a subclass of it."""
    attributes: dict[str, Any] = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "step": internals.with_hooks(_step_of(cls)),
        "state": property(_get_state, _set_state),
        "add_param_group": _add_param_group(cls),
        "load_state_dict": _load_state_dict(cls),
        "__reduce_ex__": _reduce(cls),
        "__deepcopy__": _deepcopy(cls),
    }
    if cls.zero_grad is Optimizer.zero_grad:
        attributes["zero_grad"] = _zero_grad
    return type(cls.__name__, (FlatOptimizer, cls), attributes)


def _step_of(cls: type[Optimizer]) -> Callable[..., Any]:
    own = internals.without_hooks(cls)
    names = [*inspect.signature(own).parameters][1:]

    @wraps(own)
    def step(self: Any, *args: Any, **options: Any) -> Any:
        shown = vars(self).pop("state", None)
        if shown is not None:
            vars(self)[_STEPS].absorb(shown)
        if "closure" in names:
            i = names.index("closure")
            closure = args[i] if i < len(args) else options.get("closure")
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
                is_in_buckets = vars(self)[_STEPS].bucket_bytes is not None  # each calls it once
                once_ = partial(_return, loss) if is_in_buckets else partial(_return_once, [loss], type(self).__name__)
                args = (*args[:i], once_, *args[i + 1 :])
                options = {**options, "closure": once_} if "closure" in options else options
                if "closure" in options:
                    args = args[:i]
        # The closure may have asked for the state.
        shown = vars(self).pop("state", None)
        if shown is not None:
            vars(self)[_STEPS].absorb(shown)
        return vars(self)[_STEPS].step(args, options)

    return step


def _return(loss: Any) -> Any:
    return loss


def _return_once(losses: list[Any], name: str) -> Any:
    if not losses:
        raise RuntimeError(
            f"{name} calls its closure again within one step, which a flat optimizer can't do. Use it as it is, "
            "without flatten_optimizer."
        )
    return losses.pop()


def _get_state(self: Any) -> Any:
    own = vars(self)
    if "state" not in own:
        own["state"] = own[_STEPS].show()
    return own["state"]


def _set_state(self: Any, state: Any) -> None:
    vars(self)["state"] = state


def _zero_grad(self: Any, set_to_none: bool = True) -> None:
    """Resets the gradients of all parameters, as `torch.optim.Optimizer.zero_grad` does."""
    if not set_to_none:
        Optimizer.zero_grad(self, set_to_none=False)
        return
    with torch.autograd.profiler.record_function(internals.zero_grad_label(self)), no_torch_function():
        for group in self.param_groups:
            for param in group["params"]:
                param.grad = None


def _add_param_group(cls: type[Optimizer]) -> Callable[..., None]:
    @wraps(cls.add_param_group)
    def add_param_group(self: Any, param_group: dict[str, Any]) -> None:
        cls.add_param_group(self, param_group)
        try:
            vars(self)[_STEPS].check_options()
        except NotCapturableError as error:
            del self.param_groups[-1]
            raise ValueError(_capturable(cls)) from error
        except NotElementwiseError as error:
            del self.param_groups[-1]
            raise TypeError(_advice(cls, error)) from error

    return add_param_group


def _load_state_dict(cls: type[Optimizer]) -> Callable[..., None]:
    @wraps(cls.load_state_dict)
    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        load = partial(cls.load_state_dict, self)
        if vars(self)[_STEPS].bucket_bytes is None:
            load(state_dict)
        else:
            load_to_rest(self, load, state_dict)

    return load_state_dict


def _reduce(cls: type[Optimizer]) -> Callable[..., Any]:
    def reduce_ex(self: Any, protocol: Any) -> Any:
        # A program that reads the file need not have fsdp2.
        twin = object.__new__(cls)
        vars(twin).update({name: value for name, value in vars(self).items() if name not in (_STEPS, "state")})
        vars(twin)["state"] = self.state
        # Protocol 2 and those above would compare the class with that of `self`.
        return twin.__reduce_ex__(1)

    return reduce_ex


def _deepcopy(cls: type[Optimizer]) -> Callable[..., Any]:
    def deepcopy(self: Any, memo: dict[int, Any]) -> Any:
        build, arguments, state, *_ = self.__reduce_ex__(4)
        copied = build(*arguments)
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(state, memo))
        _make_flat(copied, cls, vars(self)[_STEPS].bucket_bytes)
        if self.overlaps_forward:
            _step_beside(copied)
        return copied

    return deepcopy
