"""How ranks are started, watched and ended.

Read in this order: policy (what the supervisor decides), node (this machine's processes), supervisor (combines both),
launcher; standby and waiting; beacons, watch, hangs and stacks (which rank hangs?); environment, external (launchers
other than our supervisor); ending. May import `checkpoint` and below.
"""
