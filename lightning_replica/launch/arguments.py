"""The arguments of the function that a launcher launches: ``Trainer.fit`` and its like."""

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

FillIn: TypeAlias = Callable[[Any, Callable[..., Any], tuple[Any, ...], dict[str, Any]], inspect.BoundArguments]
"""Takes the trainer, the function and its arguments. Returns the arguments to call the function with."""
