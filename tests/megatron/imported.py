"""Imports megatron-core once: it takes two seconds, and torch 2.13 warns of what megatron-core 0.16 uses.

It also makes classes safe to unpickle (argparse.Namespace ...), which tests of other folders take for unsafe.
"""

import warnings

import torch

_safe = torch.serialization.get_safe_globals()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.models.gpt.gpt_model
    import megatron.core.parallel_state
    import megatron.core.pipeline_parallel.schedules
    import megatron.core.transformer.module  # noqa: F401
torch.serialization.clear_safe_globals()
torch.serialization.add_safe_globals(_safe)
