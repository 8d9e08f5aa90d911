"""Connections to the stores through which the processes of a run agree.

Read in this order: interface, address, tcp (torch's TCPStore, served on one address only), shared (the store of several
nodes, which may be lost). May import `core`.
"""
