"""The state of torch's scheduler for averaged weights, which is plain data in newer versions only."""

from typing import Any

from torch.optim.swa_utils import SWALR


def leave_functions_out_of_states() -> None:
    """Leave out of the state of `SWALR` what torch 2.9 puts into it, and newer ones do not.

    It is the function that its constructor has chosen. A state with a function can be neither sent nor loaded safely.
    """
    if "state_dict" not in vars(SWALR):
        SWALR.state_dict = _state_dict  # type: ignore[method-assign]


def _state_dict(self: SWALR) -> dict[str, Any]:
    return {name: value for name, value in vars(self).items() if name not in ("optimizer", "anneal_func")}
