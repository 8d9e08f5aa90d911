"""The exact position in the data: which batch comes next, with which random numbers."""
