"""What to do when a rank is lost. Knows neither Lightning nor the optimizer.

Read in this order: interface (what recovery asks of the rest), planner (what is decided), faults and generation (how
ranks agree that the world moves on), monitor, mirror, transfer, groups, recovery (the phases, in order).
"""
