"""The command line, ``lightning-replica``: one file for each command. May import everything."""
