"""Steps a flat optimizer: joins its parameters to spans, calls the optimizer's own step on these, and holds the state.

A *span* (spans.py) is one flat tensor over parameters that lie side by side; these are its *members*. An *entry* is an
element of `param_groups`; a span has members of one entry only. Parameters that can't be joined are stepped on
*beside*, each by itself.

A step (`FlatSteps.step`) finds the `Plan` for the parameters that have gradients, or makes one, for which it cuts,
joins and dissolves spans. Then it gives the entries of `param_groups` the flat tensors in place of the parameters,
calls the step of the optimizer's own class, and puts the parameters back. flat.py calls it, and asks `show` for the
state when a user reads `optimizer.state`, and `absorb` to follow what the user did to it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, compress, repeat
from operator import is_
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..shards.find import before_write, is_unsynchronized
from ..shards.runs import in_runs
from ..shards.tensors import local_if_any, local_of, no_torch_function, peek_local, spec_of
from ..torch_private.optimizers import SMALL_NUMEL, grad_of, without_hooks, zero_each
from . import kernels, resting, states
from .late import LateParts
from .probe import Verdict, probe, signature
from .spans import Packed, Place, Places, Run, Span, make_span, picker, runs
from .states import State

# An entry's parameters that are stepped on one by one, as DTensors or plain tensors.
_BESIDE = "beside"
_MOST_PLANS = 4096
# From so many elements on, an operation computes for so long that its call does not count.
_LARGE_NUMEL = 1024 * 1024


class Plan:
    """Says what one step steps on, while the same parameters have gradients. FlatSteps makes it, and drops it when a
    span changes.

    `params`: all parameters of all entries; `sizes`: how many each entry has; `absent`: which of them have no gradient;
    `odd`: indices of those whose gradients are laid out otherwise than they; `fused`: which entries asked for fused
    kernels. `stepped`: for each entry, what the optimizer's own step gets. `flats`: the spans among that; `listed`:
    (entry, spans) that a fused kernel steps on. `members`: the parameters in these spans, of `flats` first; `num_flat`:
    how many of them are in `flats`.

    Args:
        key: (params, sizes, absent, odd).
        flats, listed, stepped: see above.
    """

    def __init__(
        self,
        key: tuple[list[Tensor], list[int], list[bool], tuple[int, ...]],
        flats: list[Span],
        listed: list[tuple[int, list[Span]]],
        stepped: list[list[Tensor]],
    ) -> None:
        self.params, self.sizes, self.absent, self.odd = key
        self.flats, self.listed, self.stepped = flats, listed, stepped
        self.fused: list[Any] = []
        spans = [*flats, *(span for _, some in listed for span in some)]
        index = {id(param): i for i, param in enumerate(self.params)}
        members = [member for span in spans for member in span.members]
        self.members = [member.parameter for member in members]
        self._locals = [member.place.local for member in members]
        self._specs = [*map(spec_of, self.members)]
        # Where the gradients of the members are among those of all parameters.
        self._pick = picker([index[id(member.parameter)] for member in members])
        self._classes = {DTensor, *map(type, self.members)}
        self._filled = [bool(member.numel) for span in flats for member in span.members]
        # The gradients of each flat span among those that are not empty; where those of listed spans begin.
        self._slices: list[slice] = []
        end = 0
        for span in flats:
            begin, end = end, end + span.num_filled
            self._slices.append(slice(begin, end))
        self.num_flat = len(self._filled)
        self.padding = [each for span in flats for each in span.padding]
        # True once it was stepped by: states exist.
        self.has_stepped = False
        # What fused kernels step on, but for the gradients, once they have a state.
        self.prepared: list[tuple[int, kernels.Listed, Callable[[Sequence[Any]], Sequence[Any]]]] | None = None

    def fits(self, params: list[Tensor], sizes: list[int], absent: list[bool]) -> bool:
        """Returns True if these are its parameters, and they lie where they lay."""
        if absent != self.absent or sizes != self.sizes or not all(map(is_, params, self.params)):
            return False
        return all(map(is_, map(peek_local, self.members), self._locals))

    def pick(self, gradients: Sequence[Any]) -> Sequence[Any] | None:
        """Returns the gradients of the members, of those of all parameters; None if some are not those that reductions
        make.
        """
        picked = self._pick(gradients)
        if not self._classes.issuperset(map(type, picked)):
            return None
        return picked if all(map(is_, map(spec_of, picked), self._specs)) else None

    def pick_any(self, gradients: Sequence[Any]) -> Sequence[Any]:
        """Returns the gradients of the members, which are laid out like these."""
        return self._pick(gradients)

    def flat_gradients(self, gradients: Sequence[Tensor]) -> list[tuple[Span, Tensor, list[Tensor] | None]]:
        """Returns for each flat span its gradient as one tensor, and those of its parameters if that is a copy.

        `gradients`: the local tensors of the members' gradients.
        """
        filled = [*compress(gradients, self._filled)]
        addresses = [*map(Tensor.data_ptr, filled)]
        found: list[tuple[Span, Tensor, list[Tensor] | None]] = []
        for span, some in zip(self.flats, self._slices, strict=True):
            flat, is_copy = span.find_gradient(filled[some], addresses[some])
            found.append((span, flat, filled[some] if is_copy else None))
        return found


class FlatSteps:
    """Steps one optimizer on spans, and holds its state. The flat optimizer (flat.py) owns it.

    The state has two forms. Between steps, users see one dict for each parameter (`show`). The optimizer's own step
    sees one for each flat tensor, and for each parameter that is stepped on beside (`_live`). Only this class changes
    that.

    Args:
        optimizer: whose `param_groups` say what is stepped on, and how.
        cls: its class, without what has made it flat.
        bucket_bytes: states of parameters on a device rest on the CPU, and come to the device in buckets of so many
            bytes. None: they stay on the device.

    Raises:
        NotElementwiseError: it works on whole tensors.
    """

    def __init__(self, optimizer: Optimizer, cls: type[Optimizer], bucket_bytes: int | None = None) -> None:
        self.bucket_bytes = bucket_bytes
        # The optimizer holds this object: a cycle would keep its state until garbage is collected.
        self._reference, self._cls, self._own_step = ref(optimizer), cls, without_hooks(cls)
        self._kernel = kernels.kernel_of(cls)
        self._verdicts: dict[Any, Verdict] = {}
        # What the optimizer's own step sees as its state: of flat tensors, and of parameters that it steps one by one.
        self._live: defaultdict[Any, Any] = defaultdict(dict)
        # Identity of a flat tensor -> its span; identity of a parameter -> the span that it is in.
        self._spans: dict[int, Span] = {}
        self._span_of: dict[int, Span] = {}
        self._plans: dict[Any, Plan] = {}
        self._last: Plan | None = None
        # Parts of steps that overlap the next forward; None: steps are in the usual order.
        self.late: LateParts | None = None
        # The state as a user has seen it last, and what it was made of, to notice changes.
        self._shown: Any = None
        self._shown_of: list[tuple[Any, Any, dict[str, Any], list[int]]] = []
        self.check_options()

    # ---- what the optimizer is

    @property
    def _optimizer(self) -> Any:
        return self._reference()

    def check_options(self) -> None:
        """Asks the probe about all entries of `param_groups`.

        Raises:
            NotElementwiseError: the optimizer works on whole tensors.
            NotCapturableError: its steps may be captured, and its states are to rest on the CPU.
        """
        for options in self._optimizer.param_groups:
            if self.bucket_bytes is not None and options.get("capturable"):
                raise NotCapturableError
            for like in _kinds_of(options["params"]):
                self._verdict(options, like)

    def _verdict(self, options: dict[str, Any], like: Tensor) -> Verdict:
        """Returns what the probe has found about steps with such options on tensors like that; it is asked once."""
        key = (like.dtype, like.device, signature(options))
        if key not in self._verdicts:
            self._verdicts[key] = probe(self._optimizer, self._cls, options, like)
        return self._verdicts[key]

    def _joins(self, options: dict[str, Any], place: Place) -> bool:
        """Returns True if parameters like that get the bits that they get one by one when they are stepped as one."""
        local = place.local
        if local.device.type == "cpu" and (options.get("fused") or local.dtype.itemsize < 4):
            # Kernels compute the ends of tensors otherwise than the rest, which shows in few elements of many.
            return self._is_listed(options)
        return self._verdict(options, local).joins

    def _is_listed(self, options: dict[str, Any]) -> bool:
        """Returns True if a fused kernel steps on the parameters of that entry, each by itself."""
        return self._kernel is not None and bool(options.get("fused")) and not options.get("differentiable")

    # ---- the state, as users see it

    def show(self) -> defaultdict[Any, Any]:
        """Returns the state of each parameter, over the memory of the spans' states."""
        if self.late is not None:
            self.late.read()
        shown: defaultdict[Any, Any] = defaultdict(dict)
        self._shown_of = []
        for key, state in self._live.items():
            span = self._spans.get(id(key))
            if span is None:
                shown[key] = state
                continue
            for member in span.members if state else ():
                shown[member.parameter] = states.show(state, span, member)
        for key, state in shown.items():
            entries = dict(state) if isinstance(state, dict) else {}
            self._shown_of.append((key, state, entries, _versions_of(entries)))
        self._shown = shown
        return shown

    def absorb(self, shown: Any) -> None:
        """Takes over what a user has done to the state, or has loaded."""
        if shown is not self._shown or not self._is_as_shown(shown):
            is_empty = {key for key, state in shown.items() if isinstance(state, dict) and not state}
            self._live = defaultdict(dict, {key: state for key, state in shown.items() if key not in is_empty})
            self._forget_spans()
        self._shown, self._shown_of = None, []

    def _is_as_shown(self, shown: Any) -> bool:
        """Returns True if a user has changed nothing in the state since `show` returned it."""
        if len(shown) != len(self._shown_of):
            return False
        for key, state, entries, versions in self._shown_of:
            now = shown.get(key)
            if now is not state:
                return False
            is_same = not isinstance(now, dict) or (
                now.keys() == entries.keys() and all(map(is_, now.values(), entries.values()))
            )
            if not is_same or _versions_of(entries) != versions:
                return False
        return True

    def _forget_spans(self) -> None:
        """Forgets all spans and plans: the next step makes them of the state that parameters have then."""
        self._spans.clear()
        self._span_of.clear()
        self._forget_plans()

    def _forget_plans(self) -> None:
        self._plans.clear()
        self._last = None

    # ---- spans

    def _add(self, span: Span, state: State | None) -> None:
        """Steps on the members of `span` as on one tensor from now on. `state`: that of the tensor, if it has one."""
        self._forget_plans()  # some may step on its parameters one by one
        self._spans[id(span.flat)] = span
        if state and self._rests(span):
            with torch.no_grad():
                state = {n: resting.to_rest(v) if states.is_elements(v, span.flat) else v for n, v in state.items()}
        for member in span.members:
            self._span_of[id(member.parameter)] = span
        if state:
            self._live[span.flat] = state

    def _rests(self, span: Span) -> bool:
        """Returns True if the state of a span rests on the CPU between steps."""
        return self.bucket_bytes is not None and resting.rests_apart(span.device)

    def _remove(self, span: Span) -> State:
        """Forgets a span, and returns its state."""
        del self._spans[id(span.flat)]
        for member in span.members:
            del self._span_of[id(member.parameter)]
        self._forget_plans()
        state: State = self._live.pop(span.flat, None) or {}
        return state

    def _dissolve(self, span: Span) -> None:
        """Gives each parameter of a span its own state."""
        state = self._remove(span)
        for member in span.members if state else ():
            self._live[member.parameter] = states.show(state, span, member)

    def _cut(self, span: Span, labels: dict[int, Any]) -> None:
        """Cuts a span where the labels of its members change.

        `labels`: identity of a parameter -> the index of the entry that it is in, or _BESIDE; none if it has no
        gradient.
        """
        found = [labels.get(id(member.parameter)) for member in span.members]
        if all(label == found[0] for label in found):
            if isinstance(found[0], int):
                span.entry = found[0]
            elif found[0] == _BESIDE:
                self._dissolve(span)
            return
        state = self._remove(span)
        # A label that is None keeps its parameters together, too, until they have gradients again.
        placed = [(member.place, (label,)) for member, label in zip(span.members, found, strict=True)]
        if isinstance(span, Packed):
            parts: dict[Any, list[Place]] = {}
            for place, wrapped in placed:
                parts.setdefault(wrapped, []).append(place)
            cut = [(places, wrapped) for wrapped, places in parts.items()]
        else:
            cut = [*runs(placed)]
        for places, (label,) in cut:
            part = make_span(places, label if isinstance(label, int) else span.entry)
            self._add(part, states.split(state, span, part))
            if label == _BESIDE:
                self._dissolve(part)

    def _make_spans(
        self, places: Sequence[tuple[Place, int]], options: Sequence[dict[str, Any]], gradients: Mapping[int, Any]
    ) -> list[Tensor]:
        """Joins parameters to spans. Returns those that have to be stepped on by themselves, for their states' sake.

        `gradients`: identity of a parameter -> its gradient.
        """
        read: dict[int, State] = {}
        left: list[Tensor] = []
        for place, _ in places:
            may_rest = self.bucket_bytes is not None and resting.rests_apart(place.local.device)
            state = states.read(self._live.get(place.parameter) or {}, place, may_rest)
            if state is None:
                left.append(place.parameter)
            else:
                read[id(place.parameter)] = state
        # Small runs that can share a state: (entry, dtype, device) -> places of each.
        packs: dict[Any, list[list[Place]]] = {}
        for run, entry in runs([pair for pair in places if id(pair[0].parameter) in read]):
            begin, joins = 0, self._joins(options[entry], run[0])
            joins = joins and (self._is_listed(options[entry]) or _may_be_joined(run, gradients))
            for i in range(1, len(run) + 1):
                is_end = i == len(run) or not joins or self._is_full(run[begin : i + 1])
                if is_end or not states.can_join(read[id(run[begin].parameter)], read[id(run[i].parameter)]):
                    some, begin = run[begin:i], i
                    if joins and self._packs(options[entry], some):
                        packs.setdefault((entry, some[0].local.dtype, some[0].local.device), []).append(some)
                    else:
                        self._join(some, entry, read)
        for (entry, _, _), found in packs.items():
            pack: list[Place] = []
            for some in found:
                if pack and not states.can_join(read[id(pack[0].parameter)], read[id(some[0].parameter)]):
                    self._join(pack, entry, read)
                    pack = []
                pack += some
            self._join(pack, entry, read)
        return left

    def _may_stay(self, span: Span, options: Sequence[dict[str, Any]]) -> bool:
        """Returns False if its parameters must not be joined any more, for options have changed."""
        if len(span.members) == 1 or span.entry >= len(options):
            return True
        return self._joins(options[span.entry], span.members[0].place)

    def _is_full(self, places: Sequence[Place]) -> bool:
        """Returns True if a span of these would be too large a part of a bucket of states."""
        if self.bucket_bytes is None:
            return False
        return sum(place.local.nbytes for place in places) > self.bucket_bytes // 4

    def _packs(self, options: dict[str, Any], places: Sequence[Place]) -> bool:
        """Returns True if operations on a run take longer to call than to compute, so that copies save time."""
        is_small = sum(place.local.numel() for place in places) <= SMALL_NUMEL
        return is_small and places[0].local.device.type == "cpu" and not self._is_listed(options)

    def _join(self, places: list[Place], entry: int, read: Mapping[int, State]) -> None:
        """Makes a span of these places, and its state of theirs. `read`: identity of a parameter -> its state."""
        span = make_span(places, entry)
        found = [read[id(member.parameter)] for member in span.members]
        for place in places:
            self._live.pop(place.parameter, None)
        self._add(span, states.join(found, span) if found[0] else None)

    # ---- plans

    def _plan(
        self, params: list[Tensor], gradients: list[Any], sizes: list[int], absent: list[bool], odd: tuple[int, ...]
    ) -> Plan:
        """Returns the plan of a step, see Plan. It is made once, and again when parameters lie elsewhere.

        `gradients`: those of all `params`.
        """
        key = (tuple(map(id, params)), tuple(sizes), tuple(absent), odd, tuple(self._fused()))
        plan = self._plans.get(key)
        if plan is None or not plan.fits(params, sizes, absent):
            with torch.no_grad(), no_torch_function():
                plan = self._make_plan(params, gradients, sizes, absent, odd)
            plan.fused = self._fused()
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            self._plans[key] = plan
        self._last = plan
        return plan

    def _fused(self) -> list[Any]:
        """Returns which entries ask for fused kernels now."""
        return [group.get("fused") for group in self._optimizer.param_groups]

    def _make_plan(
        self, params: list[Tensor], gradients: list[Any], sizes: list[int], absent: list[bool], odd: tuple[int, ...]
    ) -> Plan:
        """Makes the spans what this step needs, and returns the plan: dissolves those that do not hold any more, cuts
        those of which some members have no gradient, and joins parameters that are in none.
        """
        options = self._optimizer.param_groups
        entries = [entry for entry, size in enumerate(sizes) for _ in range(size)]
        for span in [*self._spans.values()]:
            if not span.is_valid() or not self._may_stay(span, options):
                self._dissolve(span)
        places, labels = Places(), {}
        found: dict[int, Place] = {}
        for i, (param, entry) in enumerate(zip(params, entries, strict=True)):
            if not absent[i]:
                place = None if i in odd else places.find(param)
                if place is not None:
                    found[id(param)] = place
                labels[id(param)] = _BESIDE if place is None else entry
        for span in [*self._spans.values()]:
            self._cut(span, labels)
        fresh = [
            (found[id(param)], entry)
            for param, entry in zip(params, entries, strict=True)
            if id(param) in found and id(param) not in self._span_of
        ]
        of_param = {id(param): gradient for param, gradient in zip(params, gradients, strict=True)}
        beside = {*map(id, self._make_spans(fresh, options, of_param))}
        flats: dict[int, Span] = {}
        listed: dict[int, dict[int, Span]] = {}
        stepped: list[list[Tensor]] = [[] for _ in options]
        for param, entry, is_absent in zip(params, entries, absent, strict=True):
            if is_absent:
                continue
            if id(param) in beside or id(param) not in found:
                stepped[entry].append(param)
                if self.bucket_bytes is not None and self._live.get(param):
                    self._live[param] = resting.to_device(self._live[param], local_if_any(param).device)
                continue
            span = self._span_of[id(param)]
            if self._is_listed(options[entry]) and span.device.type == "cpu":
                listed.setdefault(entry, {})[id(span)] = span
            elif id(span) not in flats:
                flats[id(span)] = span
                stepped[entry].append(span.flat)
                verdict = self._verdict(options[entry], span.flat)
                span.writes_gradients, span.keeps_zeros = verdict.writes_gradients, verdict.keeps_zeros
        by_entry = [(entry, [*some.values()]) for entry, some in listed.items()]
        return Plan(([*params], sizes, absent, odd), [*flats.values()], by_entry, stepped)

    # ---- steps

    def step(self, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Takes one step. `args`, `options`: what the optimizer's own step is given besides."""
        if self.late is not None:
            self.late.begin()
        whole = [group["params"] for group in self._optimizer.param_groups]
        params, sizes = whole[0] if len(whole) == 1 else [*chain.from_iterable(whole)], [*map(len, whole)]
        with no_torch_function():
            gradients = [*map(grad_of, params)]
            absent = [*map(is_, gradients, repeat(None))]
            plan = self._last
            if plan is None or plan.odd or not plan.fits(params, sizes, absent) or plan.fused != self._fused():
                plan = self._plan(params, gradients, sizes, absent, _odd_among(params, gradients))
            picked = plan.pick(gradients)
            if picked is None:
                odd = _odd_among(params, gradients)
                plan = plan if odd == plan.odd else self._plan(params, gradients, sizes, absent, odd)
                picked = plan.pick_any(gradients)
            locals_ = [*map(local_of, picked)]
        return self._step_by(
            plan, whole, locals_, args, options
        )  # in which classes of tensors may need torch functions

    def _step_by(
        self,
        plan: Plan,
        whole: list[list[Tensor]],
        gradients: list[Tensor],
        args: tuple[Any, ...],
        options: dict[str, Any],
    ) -> Any:
        """Steps by a plan. `whole`: the parameters of all entries; `gradients`: those of the plan's members."""
        optimizer = self._optimizer
        if plan.members:
            before_write()
        with torch.no_grad():
            flat = plan.flat_gradients(gradients) if plan.flats else []
        own = vars(optimizer)
        own["state"] = self._live
        late = self.late
        if late is not None and not late.takes(plan, optimizer, gradients, flat, self._live):
            late = None
        try:
            for span, gradient, _ in flat:
                span.open()
                span.flat.grad = gradient
            if plan.listed:
                self._run_kernels(plan, gradients[plan.num_flat :])
            if late is not None:
                _give(optimizer, plan.stepped)
                return late.step(plan, optimizer, partial(self._own_step, optimizer), args, options)
            at_rest = [span for span in plan.flats if self._rests(span)]
            if at_rest:
                return self._step_in_buckets(plan, at_rest, args, options)
            return self._step_on(plan.stepped, args, options)
        finally:
            plan.has_stepped = True
            _give(optimizer, whole)
            del own["state"]
            for span, _, _ in flat:
                span.flat.grad = None
                span.close()
            self._settle(plan, flat)

    def _step_on(self, stepped: Sequence[list[Tensor]], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Calls the optimizer's own step. `stepped`: for each entry, what it gets."""
        _give(self._optimizer, stepped)
        return self._own_step(self._optimizer, *args, **options)

    def _step_in_buckets(
        self, plan: Plan, at_rest: Sequence[Span], args: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        """Steps on a bucket of spans at a time, whose states are on the device meanwhile; first on all that has its
        state there anyway.
        """
        assert self.bucket_bytes is not None, "states rest"
        numbers = {id(span.flat) for span in at_rest}
        others = [[each for each in chosen if id(each) not in numbers] for chosen in plan.stepped]
        result = self._step_on(others, args, options) if any(others) else None
        buckets = in_runs([(span, self._state_nbytes(span)) for span in at_rest], self.bucket_bytes)
        for device in dict.fromkeys(span.device for span in at_rest):
            own = [some for bucket in buckets if (some := [span for span in bucket if span.device == device])]
            held = [[entry for span in bucket for entry in self._resting_state(span)] for bucket in own]
            stream = resting.StateStream(device, [[tensor for _, _, tensor in bucket] for bucket in held])
            try:
                for i, bucket in enumerate(own):
                    here = stream.use(i)
                    for (state, name, _), tensor in zip(held[i], here, strict=True):
                        state[name] = tensor
                    flats = {id(span.flat) for span in bucket}
                    try:
                        chosen = [[each for each in entry if id(each) in flats] for entry in plan.stepped]
                        result = self._step_on(chosen, args, options)
                    finally:
                        for (state, name, on_owner_stream), tensor in zip(held[i], here, strict=True):
                            if state.get(name) is tensor:
                                state[name] = on_owner_stream
                        self._put_to_rest(bucket)
            finally:
                stream.close()
        return result

    def _resting_state(self, span: Span) -> list[tuple[State, str, Tensor]]:
        """Returns what rests of the state of a span: (the state, the name in it, the tensor)."""
        state = self._live.get(span.flat) or {}
        return [(state, name, value) for name, value in state.items() if states.is_elements(value, span.flat)]

    def _state_nbytes(self, span: Span) -> int:
        """Returns the bytes of a span's state; before its first step, when nobody knows them, those of two moments."""
        if span.flat not in self._live:
            return 2 * span.flat.nbytes
        return sum(tensor.nbytes for _, _, tensor in self._resting_state(span))

    def _put_to_rest(self, spans: Sequence[Span]) -> None:
        """Moves what a step has begun to keep of these spans to the CPU; the host waits for it."""
        with torch.no_grad():
            for span in spans:
                for state, name, value in self._resting_state(span):
                    if resting.rests_apart(value.device):
                        state[name] = resting.to_rest(value)

    def _settle(self, plan: Plan, flat: Iterable[tuple[Span, Tensor, list[Tensor] | None]]) -> None:
        """Does what is left to do for gradients, padding and version counters."""
        is_scaled = getattr(self._optimizer, "grad_scale", None) is not None
        for span, gradient, copied in flat:
            if copied is not None and (is_scaled or span.writes_gradients):
                with torch.no_grad():
                    span.write_back(gradient, copied)
        if plan.padding and not all(span.keeps_zeros for span in plan.flats):
            with torch.no_grad():
                zero_each(plan.padding)
        if plan.members:
            increment_version(plan.members)

    def _run_kernels(self, plan: Plan, gradients: list[Tensor]) -> None:
        """Steps on the spans that fused kernels step on. `gradients`: those of their parameters."""
        kernel, groups = self._kernel, self._optimizer.param_groups
        assert kernel is not None, "there are listed spans"
        if plan.prepared is None:
            plan.prepared = self._prepare(plan, kernel)
        for entry, listed, pick in plan.prepared:
            num_entries = sum(map(len, listed.states))
            kernels.run(kernel, self._optimizer, groups[entry], listed, pick(gradients))
            if sum(map(len, listed.states)) != num_entries:
                plan.prepared = None  # SGD has begun to keep a momentum

    def _prepare(self, plan: Plan, kernel: kernels.Kernel) -> list[Any]:
        """Returns, for each call of the kernel: the entry, what it steps on, and what picks the gradients of that."""
        prepared, first = [], 0
        for entry, spans in plan.listed:
            alike: dict[Any, list[tuple[Span, list[int]]]] = {}
            for span in spans:
                if span.flat not in self._live:
                    self._live[span.flat] = kernel.begin(self._optimizer, self._optimizer.param_groups[entry], span)
                names = kernels.names_of_elements(self._live[span.flat], span)
                indices = [*range(first, first + len(span.members))]
                alike.setdefault((span.dtype, span.device, names), []).append((span, indices))
                first += len(span.members)
            for (_, _, names), some in alike.items():
                listed = kernels.Listed.of([span for span, _ in some], self._live, names)
                prepared.append((entry, listed, picker([i for _, indices in some for i in indices])))
        return prepared


def _give(optimizer: Optimizer, chosen: Sequence[list[Tensor]]) -> None:
    """Has the entries of `param_groups` hold these tensors."""
    for group, params in zip(optimizer.param_groups, chosen, strict=True):
        group["params"] = params


class NotCapturableError(Exception):
    """Says that an optimizer's steps may be captured by a graph, which can't wait for copies."""


def _kinds_of(params: Sequence[Tensor]) -> list[Tensor]:
    """Returns a tensor of each dtype and device that parameters have; at least one."""
    found: dict[Any, Tensor] = {}
    for param in params:
        local = local_of(param) if isinstance(param, DTensor) else param
        if type(local) is Tensor and local.is_floating_point() and isinstance(param, DTensor):
            device = torch.device("cpu") if local.device.type == "meta" else local.device
            found.setdefault((local.dtype, device), torch.empty(0, dtype=local.dtype, device=device))
    return [*found.values()] or [torch.empty(0, device="cpu", dtype=torch.float32)]


def _may_be_joined(places: Sequence[Place], gradients: Mapping[int, Any]) -> bool:
    """Returns False for large gradients that do not lie side by side: to copy them takes memory, and saves no time."""
    if sum(place.local.numel() for place in places) <= _LARGE_NUMEL:
        return True
    own = [local_of(gradients[id(place.parameter)]) for place in places if place.local.numel()]
    return Run(places).find_flat(own, [each.data_ptr() for each in own]) is not None


def _versions_of(entries: dict[str, Any]) -> list[int]:
    """Returns the versions of the numbers in the state of a parameter, which users may write to, and the identities of
    the local tensors of the others, which they may replace.
    """
    tensors = [value for value in entries.values() if isinstance(value, Tensor)]
    return [id(local_of(value)) if isinstance(value, DTensor) else value._version for value in tensors]


def _odd_among(params: Sequence[Tensor], gradients: Sequence[Any]) -> tuple[int, ...]:
    """Returns the indices of DTensors whose gradients are laid out otherwise than they.

    Raises:
        RuntimeError: a gradient is not synchronized between ranks, or was stepped with in backward.
    """
    odd = []
    for i, (param, gradient) in enumerate(zip(params, gradients, strict=True)):
        if gradient is None or not isinstance(param, DTensor):
            continue
        if is_unsynchronized(gradient):
            gradient.to_local()  # raises
        if not _is_laid_out_like(gradient, param):
            odd.append(i)
    return tuple(odd)


def _is_laid_out_like(gradient: Any, param: DTensor) -> bool:
    if not isinstance(gradient, DTensor):
        return False
    own, local = local_of(param), local_of(gradient)
    spec, other = spec_of(param), spec_of(gradient)
    return (
        type(local) is Tensor
        and spec.placements == other.placements
        and spec.mesh == other.mesh
        and local.dtype == own.dtype
        and local.device == own.device
        and local.shape == own.shape
        and local.layout is torch.strided
        and local.is_contiguous()
    )
