"""Lightning Fabric: the sharding in a loop that the user writes.

The loop is not ours, so nothing here takes a step back: a lost rank ends the run, with an error that says what a loop
must do to get over it (`census`). May import `launch`, `checkpoint` and below, and `sharding.replica_optimizer`.
"""
