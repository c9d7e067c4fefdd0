"""Codecs: how gradients travel between ranks, for `MixedPrecisionPolicy(gradient_codec=...)`.

`Codec` says what a codec of your own has; the guide "Compressed gradients" in examples/README.md writes one.
"""

from .engine.codec import AsIs as AsIs
from .engine.codec import Cast as Cast
from .engine.codec import Codec as Codec
from .engine.codec import Rows as Rows
from .engine.codec import sum_decoded as sum_decoded
from .engine.int8 import Int8 as Int8

__all__ = ["AsIs", "Cast", "Codec", "Int8", "Rows", "sum_decoded"]
