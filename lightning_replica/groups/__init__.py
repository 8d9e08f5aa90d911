"""Process groups whose handles stay valid when the ranks behind them change. See docs/groups.md.

Read in this order: handles (the group that torch and the user hold), membership (the groups of one rank), names,
patient_store, user_groups, forks (children of this process), world (all groups of this process, opened anew in every
generation). May import `control` and below.
"""
