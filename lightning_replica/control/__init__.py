"""What the processes of a run tell each other outside of process groups, through the store.

Holds the table of all keys (`keys`), the log of generations (`generation`, `faults`, `monitor`), the journal of
collectives before training (`journal`), large values (`blobs`), agreement before training (`agreement`,
`run_on_rank0`), what ranks report to the supervisor (`trainer_facts`, `phase`), requests for a checkpoint
(`planned_save`), and what becomes of values that make no sense (`untrusted`). May import `core` and below.
"""
