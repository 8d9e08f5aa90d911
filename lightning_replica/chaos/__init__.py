"""Faults on purpose: runs a script untouched, then with faults, and compares the bits.

Read in this order: faults (one notation for the user, the injector and tests), fault_points, fault_injector, flip,
fingerprint, compare; experiment (this tool in the script), experiments (runs of a script), outside and processes
(signals from outside). May import `trainer` and below.
"""
