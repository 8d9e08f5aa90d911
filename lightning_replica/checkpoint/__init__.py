"""Sharded checkpoints: every rank writes its part, any other world reads it, nothing half-written is ever loaded.

Read bottom-up: publish (a directory, atomically), together, chunks (PyTorch Distributed Checkpoint underneath),
contents, reads, sharded, export.
"""
