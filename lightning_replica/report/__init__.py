"""Incidents: how they are written to a log, read again and drawn.

This folder holds the log (`log`), its reader (`timeline`) and its pictures (`picture`, `page`). May import `recovery`
and below.
"""
