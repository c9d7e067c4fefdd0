"""Codecs: how gradients and weights travel between ranks, for `MixedPrecisionPolicy(gradient_codec=, gather_codec=,
replica_codec=)`.

`Codec` says what a codec of your own has; the guide examples/guides/compressed-gradients.md writes one.
"""

from .engine.codec import AsIs as AsIs
from .engine.codec import Cast as Cast
from .engine.codec import Codec as Codec
from .engine.codec import Rows as Rows
from .engine.codec import sum_decoded as sum_decoded
from .engine.float8 import Float8 as Float8
from .engine.int8 import Int8 as Int8
from .engine.power_sgd import PowerSGD as PowerSGD
from .engine.replicas import GradientBucket as GradientBucket
from .features.codec_state import load_state_dict as load_state_dict
from .features.codec_state import state_dict as state_dict

__all__ = [
    *("AsIs", "Cast", "Codec", "Float8", "GradientBucket", "Int8", "PowerSGD", "Rows"),
    *("load_state_dict", "state_dict", "sum_decoded"),
]
