"""Tests that policies are checked when they are built, can't change afterwards, and return the dtype of each use."""

import copy
import dataclasses
import pickle
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy

from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from fsdp2.checks.arguments import check_policy
from fsdp2.compression import Compression, Float8, Int8
from fsdp2.engine.codec import AS_IS, AsIs, Cast

F32, BF16, F16, F64, I64 = torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64
CODEC = ("exchanges", "feedback", "packed_dtype", "sent_nbytes", "encode", "decode", "sum")


@pytest.mark.parametrize("name", ["param_dtype", "reduce_dtype", "output_dtype", "grad_dtype"])
@pytest.mark.parametrize(
    ("value", "error"),
    [("bfloat16", TypeError), (float, TypeError), (16, TypeError), (False, TypeError), (torch.zeros(1), TypeError)]
    + [(dtype, ValueError) for dtype in (I64, torch.bool, torch.uint8, torch.complex64)],
    ids=repr,
)
def test_wrong_dtype_is_refused_by_name(name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=rf"MixedPrecisionPolicy\.{name}: expected .* got {re.escape(repr(value))}"):
        MixedPrecisionPolicy(**{name: value})


@pytest.mark.parametrize("value", [None, 1, "yes", BF16])
def test_wrong_cast_forward_inputs_is_refused_by_name(value: Any) -> None:
    with pytest.raises(TypeError, match=r"MixedPrecisionPolicy\.cast_forward_inputs: expected a bool"):
        MixedPrecisionPolicy(cast_forward_inputs=value)


@pytest.mark.parametrize(
    ("param_dtype", "reduce_dtype", "stored", "compute", "gradient"),
    [
        (None, None, F32, F32, F32),
        (BF16, None, F32, BF16, F32),
        (BF16, F32, BF16, BF16, F32),
        (BF16, BF16, F32, BF16, BF16),
        (None, F32, BF16, BF16, F32),
        (F32, None, F64, F32, F64),
        (BF16, None, I64, I64, I64),
        (BF16, None, torch.bool, torch.bool, torch.bool),
    ],
)
def test_dtypes(
    param_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
    stored: torch.dtype,
    compute: torch.dtype,
    gradient: torch.dtype,
) -> None:
    """Integers are never cast; without a reduce_dtype, gradients are reduced in what the parameter is stored in."""
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    assert policy.compute_dtype(stored) == compute
    assert policy.gradient_dtype(stored) == gradient


@pytest.mark.parametrize(("wire", "summed"), [(BF16, F16), (F16, BF16), (F32, BF16), (F64, F32)])
def test_a_wire_of_more_bits_than_are_summed_is_refused(wire: torch.dtype, summed: torch.dtype) -> None:
    with pytest.raises(ValueError, match=rf"as reduce_scatter a dtype narrower.*{summed}, got {wire}"):
        MixedPrecisionPolicy(reduce_dtype=summed, compression=Compression(reduce_scatter=wire))


@pytest.mark.parametrize(
    ("wire", "summed", "stored", "sent"),
    [
        (None, None, F32, F32),
        (None, BF16, F32, BF16),
        (BF16, F32, F32, BF16),
        (BF16, F32, BF16, BF16),
        (BF16, None, F32, BF16),
        (BF16, None, F64, BF16),
        (F32, F64, BF16, F32),
        (BF16, None, BF16, BF16),
        (BF16, None, F16, F16),
        (F32, None, BF16, BF16),
        (F32, F32, F32, F32),
    ],
)
def test_gradients_are_never_sent_in_more_bits_than_they_are_summed_in(
    wire: torch.dtype | None, summed: torch.dtype | None, stored: torch.dtype, sent: torch.dtype
) -> None:
    assert (
        MixedPrecisionPolicy(reduce_dtype=summed, compression=Compression(reduce_scatter=wire)).sent_dtype(stored)
        == sent
    )


@pytest.mark.parametrize(
    ("wire", "summed", "comes_in", "sent"),
    [
        (None, F32, BF16, BF16),
        (None, None, BF16, BF16),
        (None, F32, F32, F32),
        (None, BF16, F16, BF16),
        (None, BF16, F32, BF16),
        (None, F64, F32, F32),
        (F16, F32, BF16, F16),
        (F32, F32, BF16, F32),
    ],
)
def test_gradients_may_be_sent_in_their_own_dtype(
    wire: torch.dtype | None, summed: torch.dtype | None, comes_in: torch.dtype, sent: torch.dtype
) -> None:
    """Unless the policy says in what; in another dtype of as many bits they would be rounded."""
    assert (
        MixedPrecisionPolicy(reduce_dtype=summed, compression=Compression(reduce_scatter=wire)).sent_dtype(
            F32, comes_in
        )
        == sent
    )


@pytest.mark.parametrize(
    "policy",
    [
        MixedPrecisionPolicy(BF16, F32, compression=Compression(reduce_scatter=BF16)),
        MixedPrecisionPolicy(compression=Compression(reduce_scatter=BF16, all_gather=Float8())),
        OffloadPolicy(),
        CPUOffloadPolicy(),
    ],
    ids=repr,
)
def test_policies_are_values(policy: Any) -> None:
    """Shared as a default argument and between groups: nobody may change one; equal ones are interchangeable."""
    for name in [field.name for field in dataclasses.fields(policy)]:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(policy, name, None)
    for other in (copy.deepcopy(policy), pickle.loads(pickle.dumps(policy)), dataclasses.replace(policy)):
        assert other == policy
        assert hash(other) == hash(policy)


def test_objects_with_the_same_fields_are_policies() -> None:
    """torch's own, of any release: its first four fields must be there, the others may."""
    fields = {"param_dtype": BF16, "reduce_dtype": F32, "output_dtype": F64, "cast_forward_inputs": False}
    assert check_policy(SimpleNamespace(**fields)) == MixedPrecisionPolicy(**fields)
    fields |= {"param_dtype_override_fn": print, "compression": Compression(Float8(), BF16)}
    assert check_policy(SimpleNamespace(**fields)) == MixedPrecisionPolicy(**fields)
    with pytest.raises(ValueError, match=r"MixedPrecisionPolicy\.compression: .*narrower"):
        check_policy(SimpleNamespace(**fields | {"compression": Compression(reduce_scatter=F64)}))
    assert check_policy(TorchPolicy(BF16, F32)) == MixedPrecisionPolicy(BF16, F32)


class Addressed(Cast):
    """Two of them can't be compared between processes."""

    __repr__ = object.__repr__


@pytest.mark.parametrize(
    ("codec", "match"),
    [
        (Cast, "got its class"),
        (3, "one without exchanges, feedback, packed_dtype, sent_nbytes, encode, decode, sum"),
        (SimpleNamespace(exchanges=True, feedback=False, encode=print, decode=print, sum=print), "packed_dtype, sent_"),
        (Addressed(BF16), "whose repr says how it encodes"),
    ],
)
def test_what_is_no_codec_is_refused(codec: Any, match: str) -> None:
    with pytest.raises(TypeError, match=rf"Compression\.reduce_scatter: expected a.* codec.*{match}"):
        Compression(reduce_scatter=codec)


def test_a_codec_that_may_change_is_refused() -> None:
    codec: Any = SimpleNamespace(**{name: getattr(Cast(BF16), name) for name in CODEC})
    with pytest.raises(TypeError, match="a codec that can be hashed, a frozen dataclass"):
        Compression(reduce_scatter=codec)


def test_a_dtype_holds_for_all_parameters() -> None:
    """A codec for those of 256 elements or more, in two dims that are longer than one."""
    policy = MixedPrecisionPolicy(BF16, F32, compression=Compression(None, F16, F16))
    assert policy.compression.all_reduce == Cast(F16)
    for shape in ((3,), (64, 64)):
        assert policy.codec_for(F32, BF16, shape) == Cast(F16)
    coded = MixedPrecisionPolicy(BF16, F32, compression=Compression(Float8(), Int8()))
    assert [coded.codec_for(F32, BF16, shape) for shape in ((3,), (64, 64))] == [Cast(BF16), Int8()]
    assert [coded.gather_codec_for(F32, shape) for shape in ((3,), (64, 64))] == [None, Float8()]


def test_a_dtype_as_wide_as_what_travels_changes_nothing() -> None:
    """Gradients then travel in the dtype of their sums on gloo, too, and not in the one that autograd computes."""
    policy = MixedPrecisionPolicy(BF16, F32, compression=Compression(BF16, F32, F32))
    assert policy.codec_for(F32, BF16) == AS_IS
    assert policy.gather_codec_for(F32, (64, 64)) is None


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"param_dtype": BF16, "compression": Compression(all_gather=F32)}, "all_gather a dtype narrower than param_"),
        ({"reduce_dtype": BF16, "compression": Compression(all_reduce=F32)}, "all_reduce a dtype narrower than reduce"),
    ],
)
def test_dtypes_that_would_compress_nothing_are_refused(given: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        MixedPrecisionPolicy(**given)


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "all_reduce"])
@pytest.mark.parametrize("value", [I64, torch.float8_e4m3fn, torch.complex64])
def test_other_dtypes_are_refused(name: str, value: torch.dtype) -> None:
    with pytest.raises(TypeError, match=rf"^Compression\.{name}: expected a floating-point dtype of 16 bits or more"):
        Compression(**{name: value})


def test_codecs_that_would_do_nothing_are_refused() -> None:
    for name in ("all_gather", "all_reduce"):
        with pytest.raises(ValueError, match=rf"^Compression\.{name}: expected a codec that exchanges bytes, got AsIs"):
            Compression(**{name: AsIs()})


def test_compression_is_one_value() -> None:
    with pytest.raises(
        TypeError, match=r"MixedPrecisionPolicy\.compression: expected a fsdp2\.compression\.Compression"
    ):
        MixedPrecisionPolicy(compression=Int8())  # type: ignore[arg-type]


def test_defaults_and_order_are_those_of_torch() -> None:
    """Clients pass them positionally."""
    assert MixedPrecisionPolicy(F16, F32, F64, False) == MixedPrecisionPolicy(
        param_dtype=F16, reduce_dtype=F32, output_dtype=F64, cast_forward_inputs=False
    )
    assert MixedPrecisionPolicy() == MixedPrecisionPolicy(None, None, None, True)
    assert CPUOffloadPolicy() == CPUOffloadPolicy(pin_memory=True)
    assert isinstance(CPUOffloadPolicy(), OffloadPolicy)
