"""How torch's and FairScale's own tests end against `ReplicaOptimizer`, where they do not pass, and why."""

_STATE = "Reads the state of a parameter from `optim.state`. Here the state belongs to pieces of parameters."
_SHARD = "Adds up the parameters that `optim` holds on a rank. Here it holds all, and pieces while it updates."
_CLOSURE = "Has other gradients on every rank, so the result depends on which rank updates a parameter."
_HOLDERS = "Has other gradients on every rank, so the holders of a shard update it differently."
_DTYPES = "Expects an error for parameters of several dtypes. Here each dtype has a buffer of its own."
_OVERLAP = "Overlaps updates with DDP, which is refused, with advice: see [migration](migration.md#overlap_with_ddp)."

FAIL = {
    "TestZeroRedundancyOptimizerSingleRank::test_state_dict": _STATE,
    "TestZeroRedundancyOptimizerSingleRank::test_same_dense_param_type": _DTYPES,
    "TestZeroRedundancyOptimizerDistributed::test_step_with_closure": _CLOSURE,
    "TestZeroRedundancyOptimizerDistributed::test_sharding": _SHARD,
    "TestZeroRedundancyOptimizerDistributed::test_add_param_group": _SHARD,
    "TestZeroRedundancyOptimizerDistributed::test_ddp_zero_overlap": _OVERLAP,
    "TestSingleRank::test_state_dict": _STATE,
    "test_add_param_group": _SHARD,
    "test_sharding": _SHARD,
}
"""Why a test fails; of a test with parameters, for all of them."""

FAIL_WITH_HOLDERS = {"TestZeroRedundancyOptimizerDistributed::test_nondefault_process_group": _HOLDERS}
"""Why a test fails where more than one rank holds a shard."""

_GPUS = "Needs GPUs: the test puts its tensors there."

SKIP = {
    "TestZeroRedundancyOptimizerDistributed::test_zero_model_parallel": _GPUS,
    "TestSingleRank::test_device_change": _GPUS,
    "test_empty_shard[nccl]": _GPUS,
    "test_step": _GPUS,
    "test_step_with_closure": _GPUS,
    "test_collect_shards": _GPUS,
    "test_reproducibility": _GPUS,
    "test_gradient_clipping": _GPUS,
    "test_state_dict_distributed": _GPUS,
    "test_ddp_parity": 'Needs GPUs, and FairScale skips it everywhere: "broken at head".',
}
"""Why a test does not apply."""


def reason(test: str, replicas: int = 1) -> tuple[str, str]:
    """How a test is expected to end, and why."""
    for outcome, tests in (("failed", FAIL | FAIL_WITH_HOLDERS if replicas > 1 else FAIL), ("skipped", SKIP)):
        for name, why in tests.items():
            if test == name or test.startswith((f"{name}[", f"{name}_")) and test not in tests:
                return outcome, why
    return "passed", ""
