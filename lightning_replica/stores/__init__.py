"""Connections to the stores through which the processes of a run agree.

Read in this order: interface, address, part, secret, tagged (values that strangers cannot write), tcp (torch's
TCPStore, served on one address only), reach, shared (the store of several nodes, which may be lost). May import `core`.
"""
