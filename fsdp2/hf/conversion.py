"""Translates names and shapes between files of Transformers and its models, by the mapping that it has for its classes.

Transformers keeps, for each class, which tensors of the files are renamed, joined, cut and transposed into which
parameters. Its own functions run here on tensors on meta, of which a tracer notes where their elements come from. So
there is no table of names, and each rank still reads and writes the bytes of its own shards.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..torch_private.files import (
    IGNORED_MISSING,
    IGNORED_ON_SAVE,
    IGNORED_UNEXPECTED,
    TIED,
    USED_CONVERSIONS,
    storage_key,
)
from .files import FileTensor, Layout
from .skeleton import SAVE_IN_FULL, base_of, inside, make_parts, make_skeleton
from .tensors import ModelTensor
from .trace import Tracer
from .views import View

_BY_NAMES = "Pass convert=False, and names= where files call tensors otherwise"
_READ_ELSEWHERE = "Load the model by from_pretrained, and shard it then"
_SAVE_AS_IT_IS = "Pass convert=False to save it under the model's own names, which from_pretrained reads as well"


class Reading(NamedTuple):
    """Says how files are read. `sources`: FQN -> view of tensors in the files. `adapters`: tensors that peft has added.
    `missing`, `unexpected`: patterns of parameters that files may lack, and of tensors that they may have besides, by
    the class of the model.
    """

    sources: dict[str, View]
    adapters: set[ModelTensor]
    missing: list[str]
    unexpected: list[str]


def converter_of(
    model: nn.Module, tensors: Sequence[ModelTensor], *, without_adapters: bool = False
) -> Converter | None:
    """Returns what converts the files of a model; None if it is none of Transformers, or an old version is there.

    `without_adapters`: the files are those of the model to which peft has added adapters.
    """
    transformers = sys.modules.get("transformers")
    if transformers is None:
        return None
    try:
        from transformers import PreTrainedModel, conversion_mapping  # noqa: F401
    except ImportError:  # before version 5
        return None
    if not isinstance(inside(model, without_adapters), PreTrainedModel):
        return None
    has_adapters = without_adapters and any(base_of(module) is not None for module in model.modules())
    skeleton = make_skeleton(model, tensors, parts := make_parts(tensors), without_adapters=has_adapters)
    return Converter(skeleton, tensors, parts, has_adapters)


class Converter:
    """Converts names and shapes between the files of one model and the model."""

    def __init__(
        self, skeleton: Any, tensors: Sequence[ModelTensor], parts: Mapping[str, Tensor], has_adapters: bool
    ) -> None:
        self._skeleton, self._tensors = skeleton, tensors
        self._used: list[Any] = []
        # Names of the skeleton, which are those of the model but for adapters -> tensors of both.
        self._owners = {name: each for each in tensors for name in each.names}
        if has_adapters:
            owners = {id(parts[each.name]): each for each in tensors}
            state = skeleton.state_dict(keep_vars=True)
            self._owners = {name: owners[id(part)] for name, part in state.items() if id(part) in owners}
        self._expected = {name: parts[each.name] for name, each in self._owners.items()}

    def read(self, files: Mapping[str, FileTensor]) -> Reading:
        """Returns of which tensors in the files each parameter and buffer consists.

        Raises:
            NotImplementedError: Transformers computes a parameter from tensors in the files.
            ValueError: it can't convert tensors of these shapes.
        """
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

        model, expected = self._skeleton, self._expected
        conversions = get_model_conversion_mapping(model)
        renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
        converters = [each for each in conversions if isinstance(each, WeightConverter)]
        prefix = model.base_model_prefix
        tracer = Tracer(of_files=True)
        # First parameter of a conversion -> what converts, and the patterns and names of what is converted.
        jobs: dict[str, tuple[Any, list[tuple[str, str]]]] = {}
        sources: dict[str, View] = {}
        for name in sorted(files, key=dot_natural_key):
            new, pattern = rename_source_key(name, renamings, converters, prefix, expected)
            if new not in expected and name in expected:  # it has its final name already
                new, pattern = rename_source_key(name, [], [], prefix, expected)
            if new not in expected:
                continue
            if pattern is None:
                sources[new] = _view(
                    tracer, tracer.source(name, files[name].shape, files[name].dtype), new, _READ_ELSEWHERE
                )
            else:
                converter = next(each for each in reversed(converters) if pattern in each.source_patterns)
                jobs.setdefault(new, (converter, []))[1].append((pattern, name))
        for first, (converter, found) in jobs.items():
            own = copy.deepcopy(converter)
            for pattern, name in found:
                each = tracer.source(name, files[name].shape, files[name].dtype)
                own.add_tensor(first, name, pattern, each)
            sources.update(self._convert(tracer, own, first, [name for _, name in found]))
        buffers = [name for name, _ in model.named_buffers()]
        unexpected = [*(getattr(model, IGNORED_UNEXPECTED, None) or ())]
        # Buffers that older versions saved.
        if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
            unexpected.append(r"rotary_emb\.inv_freq")
        if any(name.endswith("position_ids") for name in buffers):
            unexpected.append(r"(^|\.)position_ids$")
        self._used = [each for each in conversions if each.was_used()]
        adapters = {*self._tensors} - {*self._owners.values()}
        return Reading(self._by_fqn(sources), adapters, [*(getattr(model, IGNORED_MISSING, None) or ())], unexpected)

    def _by_fqn(self, sources: Mapping[str, View]) -> dict[str, View]:
        """Returns the same with the names that the model has, where adapters are between its modules."""
        found: dict[str, View] = {}
        for name, view in ((name, view) for name, view in sources.items() if name in self._owners):
            names = self._owners[name].names
            found[name if name in names else next(each for each in names if each not in found)] = view
        return found

    def _convert(self, tracer: Tracer, converter: Any, first: str, names: Sequence[str]) -> dict[str, View]:
        try:
            with tracer:
                made = converter.convert(first, model=self._skeleton, config=self._skeleton.config)
        except (RuntimeError, ValueError, IndexError, TypeError, AttributeError, KeyError) as error:
            raise ValueError(
                f"{first}: Transformers can't make it of {len(names)} tensors of the files ({names[0]}, ...): {error}. "
                f"Build the model from the configuration of the files. {_BY_NAMES}."
            ) from error
        return {name: _view(tracer, found, name, _READ_ELSEWHERE) for name, found in made.items()}

    def note(self, model: nn.Module) -> None:
        """Notes on a model by which conversions its files were read, as `from_pretrained` does."""
        setattr(model, USED_CONVERSIONS, self._used)

    def write(self, named: Iterable[ModelTensor]) -> tuple[dict[str, View], Layout]:
        """Returns of which parameters and buffers each tensor in the files consists, and what else decides in which
        file it is. Both are in the order of the files.

        `named`: these are left out.

        Raises:
            NotImplementedError: Transformers computes a tensor in the files from parameters.
        """
        from transformers.core_model_loading import revert_weight_conversion

        left_out = {*named}
        tracer, state = Tracer(), {}
        ignored = {*(getattr(self._skeleton, IGNORED_ON_SAVE, None) or ())}
        tied = self._tied_names()
        kept = {_main_name(each, tied): each for each in self._tensors if each not in left_out}
        for name in self._skeleton.state_dict():
            if name in kept and name not in ignored:
                state[name] = tracer.source(name, kept[name].shape, kept[name].dtype)
        with tracer:
            made = revert_weight_conversion(self._skeleton, state)
        views, blocks = {}, {}
        for name, found in made.items():
            tensor = found[0] if isinstance(found, list) else found
            is_computed = not isinstance(tracer.view_of(tensor), View)
            views[name] = _view(tracer, tensor, name, self._advice_to_save(state) if is_computed else "")
            # Views of one tensor stay together.
            blocks[name] = storage_key(tensor), tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
        return views, Layout(blocks, self._skeleton.num_parameters())

    def _advice_to_save(self, names: Iterable[str]) -> str:
        """Returns what to do where a tensor in the files is computed. Under the names of the model, its parameters can
        be saved unless `from_pretrained` converts files with these names.
        """
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, rename_source_key

        conversions = get_model_conversion_mapping(self._skeleton)
        converters = [each for each in conversions if isinstance(each, WeightConverter)]
        prefix = self._skeleton.base_model_prefix
        patterns = [rename_source_key(name, [], converters, prefix, self._expected)[1] for name in names]
        return _SAVE_AS_IT_IS if all(pattern is None for pattern in patterns) else SAVE_IN_FULL

    def _tied_names(self) -> set[str]:
        """Returns the patterns of parameters that classes say to be tied to others."""
        return {
            f"{prefix}.{name}".removeprefix(".")
            for prefix, module in self._skeleton.named_modules()
            for name in (getattr(module, TIED, None) or ())
        }


def _view(tracer: Tracer, found: Any, name: str, advice: str) -> View:
    """Returns of what a converted tensor consists.

    Raises:
        NotImplementedError: it has been computed.
    """
    view = tracer.view_of(found[0] if isinstance(found, list) else found)
    if isinstance(view, str):
        raise NotImplementedError(
            f"{name}: Transformers computes it ({view}), and fsdp2.hf moves values only. {advice}."
        )
    return view


def _main_name(tensor: ModelTensor, tied: set[str]) -> str:
    """Returns the name under which a parameter is saved: one that is not tied to another, if there is such a name."""
    if len(tensor.names) == 1:
        return tensor.name
    rest = [name for name in tensor.names if not any(re.search(pattern, name) for pattern in tied)]
    return rest[0] if rest else max(tensor.names)
