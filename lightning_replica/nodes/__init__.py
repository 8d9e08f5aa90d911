"""Several nodes with one supervisor each: who is in, which node has which ranks, and which node is lost.

Read in this order: node_settings, placement (pure), liveness (pure), membership (who has come), meeting (who is first),
heartbeats, cluster (combines them for one supervisor), job (the whole run on one node). May import `launch` and below.
"""
