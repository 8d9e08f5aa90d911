"""What Lightning sees: the strategy, the loops, the steps, and how a process takes part in a run.

Read in this order: strategy, collectives, session (what lasts from the start of a rank to its end), steps (a training
step and its recovery, in the order of calls), fit_loop, precision, hooks, saving/. May import everything but the user's
callbacks, `chaos` and the command line. `extension` loads a tool that takes part in training.
"""
