"""What is written to disk: optimizer state whole, in torch's own format (`full`), or in shards.

Every rank writes its part of a sharded checkpoint, any other world reads it, nothing half-written is ever loaded.
Read bottom-up: publish (a directory, atomically), together, chunks (PyTorch Distributed Checkpoint underneath),
contents, reads, sharded, export.
"""
