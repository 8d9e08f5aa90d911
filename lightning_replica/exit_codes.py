"""Exit codes that say more than "failed" to whatever has started a training.

Any other code is that of the rank that failed first, 128 + n for signal n.
"""

ORPHANED = 70
"""Of a rank: its supervisor is gone, or, under another launcher, the store through which ranks agree."""

GASP_WRITTEN = 75
"""The run has ended before its time, and left a complete checkpoint: start it again (sysexits.h: EX_TEMPFAIL)."""

NOTHING_SAVED = 76
"""The run has ended before its time, and its last checkpoint could not be written; an earlier one must do."""

GAVE_UP = 77
"""A rank was lost and could not be replaced, and nobody had asked for a last checkpoint (`DyingGaspCheckpoint`)."""

NO_PROGRESS = 93
"""The run has failed at a step at which the two before it have: do not start it again. What they left is whole."""

DEVICE_LOST = 78
"""This rank cannot use its device any more; under this package's own launcher, a new process takes its place."""
