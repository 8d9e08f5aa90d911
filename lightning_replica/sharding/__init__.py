"""The engine: what a rank owns, how it is reduced, updated and gathered.

Other packages use `engine` only; `roles` says what an engine can do. Read the modules bottom-up: layout, values,
buffers, collectives, reducer, gradients, piece, optimizer, guard, state. `replica_optimizer` is for users, without the
engine. May import `core.recoverable`, `groups` and below.
"""
