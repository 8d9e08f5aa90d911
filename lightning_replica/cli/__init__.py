"""The command line: ``lightning-replica doctor`` and ``lightning-replica plan``."""
