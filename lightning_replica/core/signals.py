"""Names of signals."""

import signal


def signal_name(number: int) -> str:
    """Return the name of a signal, also of a real-time one, which `signal.Signals` may not know."""
    try:
        return signal.Signals(number).name
    except ValueError:
        first, last = getattr(signal, "SIGRTMIN", 0), getattr(signal, "SIGRTMAX", -1)
        return f"SIGRTMIN+{number - first}" if first <= number <= last else f"signal {number}"
