"""Sharded checkpoints: every rank writes its part, any other world reads it, nothing half-written is ever loaded.

Read the files bottom-up: manifest, publish (replaces a directory atomically), storage (a file system or a store: disk,
object_store), verification, contents, coverage (checks that every element is there), directory (the checkpoints of a
run), named_model, barrier, chunks (uses PyTorch Distributed Checkpoint), reads, writes, boxes (where a rank's tensors
lie in the whole model), sources, resharding, sharded, export, whole_model, torch_dist and from_torch_dist
(megatron-core's format). May import `sharding.engine` and below.
"""
