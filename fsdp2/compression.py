"""Compresses weights and gradients while they travel between ranks, for `MixedPrecisionPolicy(compression=)`.

`Codec` says what a codec of your own has; the guide examples/guides/compressed-gradients.md writes one.
"""

from .codecs.comm_hook import GradBucket as GradBucket
from .codecs.float8 import Float8 as Float8
from .codecs.int8 import Int8 as Int8
from .codecs.power_sgd import PowerSGD as PowerSGD
from .engine.codec import Codec as Codec
from .engine.codec import Compression as Compression
from .engine.codec import Rows as Rows
from .engine.codec import sum_decoded as sum_decoded

__all__ = ["Codec", "Compression", "Float8", "GradBucket", "Int8", "PowerSGD", "Rows", "sum_decoded"]
