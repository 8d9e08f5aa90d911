"""Basic terms and helpers that all folders above use, and that need neither a store nor a supervisor.

Holds the table of ranks (`grid`), the named points of a step (`points`), waiting for collectives
(`pending_work`, `exchange`), digests, plain data that is safe to read (`plain`), the options of recovery, what it
requires of the state that it recovers (`recoverable`), validation (`checks`), and output for the user (`messages`,
`output`). May import `devices` and `_compat`.
"""
