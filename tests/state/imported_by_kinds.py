"""Variables in a module of Python, which `tests.state.kinds` imports in training."""

count = 0
SEEN: list[int] = []
