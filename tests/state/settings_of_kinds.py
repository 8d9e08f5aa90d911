"""Settings in a module of Python, which `tests.state.kinds` holds as an attribute."""

RATE = 0
