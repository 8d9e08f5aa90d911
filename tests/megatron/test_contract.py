"""Every name of megatron-core that the package uses, in the release that is installed here."""

import ast
import importlib
import inspect
from pathlib import Path

import pytest

from lightning_replica._compat import megatron

SOURCE = Path(megatron.__file__)


def used() -> list[tuple[str, str]]:
    """The module and the name of each import of megatron-core."""
    tree = ast.parse(SOURCE.read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return [
        (node.module, alias.name)
        for node in imports
        if node.module is not None and node.module.startswith("megatron")
        for alias in node.names
    ]


def test_only_compat_imports_it() -> None:
    package = SOURCE.parents[1]
    importing = [path for path in package.rglob("*.py") if "from megatron" in path.read_text()]
    assert importing == [SOURCE]
    assert len(used()) > 5


@pytest.mark.parametrize(("module", "name"), used())
def test_a_name_exists(module: str, name: str) -> None:
    found = importlib.import_module(module)
    assert hasattr(found, name) or importlib.import_module(f"{module}.{name}")


@pytest.mark.parametrize(
    ("module", "function", "parameters"),
    [
        (
            "megatron.core.parallel_state",
            "initialize_model_parallel",
            [
                "tensor_model_parallel_size",
                "pipeline_model_parallel_size",
                "context_parallel_size",
                "distributed_timeout_minutes",
                "create_gloo_process_groups",
            ],
        ),
        (
            "megatron.core.pipeline_parallel.schedules",
            "forward_backward_pipelining_without_interleaving",
            [
                "forward_step_func",
                "data_iterator",
                "model",
                "num_microbatches",
                "seq_length",
                "micro_batch_size",
                "forward_only",
            ],
        ),
        ("megatron.core.distributed.finalize_model_grads", "finalize_model_grads", ["model"]),
        ("megatron.core.tensor_parallel", "model_parallel_cuda_manual_seed", ["seed"]),
    ],
)
def test_a_function_takes_what_it_is_given(module: str, function: str, parameters: list[str]) -> None:
    taken = inspect.signature(getattr(importlib.import_module(module), function)).parameters
    assert set(parameters) <= set(taken)


def test_the_order_of_ranks_is_the_default() -> None:
    """`ParallelSizes` computes with it."""
    from megatron.core.parallel_state import initialize_model_parallel

    assert inspect.signature(initialize_model_parallel).parameters["order"].default == "tp-cp-ep-dp-pp"


def test_the_state_of_a_rerun_state_machine() -> None:
    """Whoever gives the machine another attribute decides whether it goes back with a step."""
    from megatron.core.rerun_state_machine import RerunStateMachine

    of_a_step = {
        "validation_counts",
        "failed_validation_call",
        "initial_result",
        "suspicious_node",
        "suspicious_device",
    }
    of_a_step |= {"saved_state", "data_iterator_checkpoints", "saved_results", "stats"}
    settings = {"mode", "error_injector", "result_rejected_tracker_filename", "state_save_func", "state_restore_func"}
    settings |= {"injected_result"}
    found = {name: value for name, value in vars(RerunStateMachine()).items() if name not in of_a_step | settings}
    assert {**found, "state": found["state"].value} == megatron.RERUN_BEGINS
