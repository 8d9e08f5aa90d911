"""What a rank owns: which part of the flat state, where it lies, how it is reduced, updated and gathered.

Read bottom-up: layout, buffers, collectives, reducer, optimizer, state.
"""
