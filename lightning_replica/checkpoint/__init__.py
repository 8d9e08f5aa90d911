"""Sharded checkpoints: every rank writes its part, any other world reads it, nothing half-written is ever loaded.

Read the files bottom-up: manifest, publish (replaces a directory atomically), contents, coverage (checks that every
element is there), directory (the checkpoints of a run), together, chunks (uses PyTorch Distributed Checkpoint), reads,
writes, sharded, export. May import `sharding.engine` and below.
"""
