"""Recovery after the loss of a rank. Nothing here depends on Lightning or on the optimizer.

Read in this order: `core.recoverable` (what recovery requires of the rest), planner (what is decided), mirror,
transfer, recovery (the phases, in order), gasp (a run that cannot continue), incident and account (what has happened).
May import `groups` and below.
"""
