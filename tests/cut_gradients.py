"""Has small models cut their gradients as large ones do."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from fsdp2.engine import buckets


def cut_gradients(bucket_bytes: int, piece_bytes: int) -> None:
    """From now on a gradient of `bucket_bytes` is a bucket of its own, and a lone one is cut into pieces of about
    `piece_bytes`, on CPU and on devices.
    """
    buckets.MIN_BUCKET_BYTES = buckets.MAX_BUCKET_BYTES = bucket_bytes
    buckets.MIN_PIECE_BYTES = piece_bytes
    buckets.MIN_PIECE_BYTES_OF_RANK = max(1, piece_bytes // 8)


@contextmanager
def small_pieces(bucket_bytes: int = 1, piece_bytes: int = 1024) -> Iterator[None]:
    """Context: `cut_gradients` holds."""
    of_buckets = ("MIN_BUCKET_BYTES", "MAX_BUCKET_BYTES")
    of_pieces = ("MIN_PIECE_BYTES", "MIN_PIECE_BYTES_OF_RANK")
    with (
        mock.patch.multiple(buckets, **{name: getattr(buckets, name) for name in of_buckets}),
        mock.patch.multiple(buckets, **{name: getattr(buckets, name) for name in of_pieces}),
    ):
        cut_gradients(bucket_bytes, piece_bytes)
        yield
