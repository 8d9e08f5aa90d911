"""What is written to disk: optimizer state whole, in torch's own format (`full`), or in shards.

Every rank writes its part of a sharded checkpoint, any other world reads it, nothing half-written is ever loaded.
Read bottom-up: manifest, publish (a directory, atomically), contents, coverage (is every element there?), directory
(the checkpoints of a run), together, chunks (PyTorch Distributed Checkpoint underneath), reads, writes, sharded,
export.
"""
