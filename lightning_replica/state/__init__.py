"""The state of a rank beside its shard: what is restored when a step is repeated, and what a replacement gets.

Read in this order: snapshot (the state at one point of training), trainer_state (how it is taken), host_state (the
snapshots that a rank holds), then the parts of a snapshot: metrics, param_groups, module_buffers, callback_state,
objects/ (in it: capture, records, tracked, wire), reachable, code_variables, frozen, own_states, structure,
loop_results, data/ (the position in the data, and the workers of loaders). The rest deals with what a run writes to
the outside: written, logger_rows, logger_runs, checkpoint_files. May import `launch` and below.
"""
