"""The command line: ``lightning-replica doctor``, ``plan``, ``export``, ``chaos`` and ``timeline``."""
