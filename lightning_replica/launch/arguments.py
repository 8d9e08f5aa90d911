"""The arguments of what a launcher launches: ``Trainer.fit`` and its like."""

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

FillIn: TypeAlias = Callable[[Any, Callable[..., Any], tuple[Any, ...], dict[str, Any]], inspect.BoundArguments]
"""Called with the trainer, the function and its arguments; gives the arguments to call it with."""
