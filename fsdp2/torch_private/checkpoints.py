"""Holds the private names of torch that `fsdp2.checkpoint` uses, each with the reason."""

from __future__ import annotations

from .lookup import optional

__all__ = ["METADATA_NAMES", "STORAGE_INFO"]

METADATA_NAMES = {
    "collections": "OrderedDict",
    "torch": "Size",
    "torch.serialization": "_get_layout",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo _StoragePrefix",
    "torch.distributed.checkpoint.metadata": "Metadata MetadataIndex StorageMeta TensorStorageMetadata "
    "TensorProperties BytesStorageMetadata ChunkStorageMetadata _MEM_FORMAT_ENCODING",
    "torch.distributed._shard.sharded_tensor.metadata": "TensorProperties MEM_FORMAT_ENCODING",  # of older releases
}
"""Module -> the classes and functions in it that the pickle `.metadata` of a distributed checkpoint names. Some are
private to torch."""
STORAGE_INFO = optional("torch.distributed.checkpoint.filesystem._StorageInfo", "fsdp2.checkpoint")
"""The class of a place in a file in `.metadata`. torch has no public one."""
