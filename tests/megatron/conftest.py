"""Imports megatron-core once, for torch 2.13 warns of what megatron-core 0.16 uses."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import megatron.core.parallel_state
    import megatron.core.pipeline_parallel.schedules
    import megatron.core.transformer.module  # noqa: F401
