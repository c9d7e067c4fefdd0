"""The public protocol of sharded modules, implemented for fsdp2's modules and for those of torch's own FSDP2."""
