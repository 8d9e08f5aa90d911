"""The engine: what a rank owns, how it is reduced, updated and gathered. Other packages use `engine` only.

Read the modules bottom-up: layout, buffers, collectives, reducer, gradients, piece, optimizer, guard, state.
May import `recovery.interface`, `groups` and below.
"""
