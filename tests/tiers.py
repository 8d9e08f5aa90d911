"""The quick tier: what ``scripts/test --quick`` runs, in six to twelve minutes on two cores.

It runs everything but `LONG`, and of `LONG` one case of each kind. All of it is in the whole run.
"""

LONG = (
    "tests/accelerators/test_npu.py",
    "tests/callbacks/test_hooks.py",
    "tests/callbacks/test_mindio_page.py::test_the_example",
    "tests/callbacks/test_report.py",
    "tests/chaos/test_chaos.py::test_a_script_that_survives",
    "tests/chaos/test_fault_injector.py::test_by_the_clock",
    "tests/chaos/test_fault_injector.py::test_every_kind_once",
    "tests/chaos/test_fault_injector.py::test_places",
    "tests/chaos/test_fault_injector.py::test_random_faults",
    "tests/chaos/test_outside.py::test_a_job_that_survives",
    "tests/checkpoint/test_kills.py",
    "tests/checkpoint/test_mutations.py::test_a_mutated_manifest",
    "tests/checkpoint/test_sharded.py",
    "tests/checkpoint/test_store.py",
    "tests/checkpoint/test_store_kills.py",
    "tests/checkpoint/test_trouble.py",
    "tests/cli/test_doctor.py",
    "tests/compat/test_packages.py",
    "tests/conf/test_conf.py::test_a_copied_yaml",
    "tests/conf/test_wheel.py",
    "tests/devices/test_torch_npu_contract.py",
    "tests/examples",
    "tests/fabric/test_launch.py",
    "tests/faults",
    "tests/groups/test_groups.py::test_a_peer_that_leaves_half_way",
    "tests/launch/test_external.py",
    "tests/launch/test_hang.py",
    "tests/launch/test_hang_while_saving.py",
    "tests/launch/test_logging_script.py",
    "tests/launch/test_script.py",
    "tests/launch/test_set_up.py",
    "tests/launch/test_waiting.py",
    "tests/megatron/test_as_by_hand.py",
    "tests/megatron/test_as_by_megatron.py",
    "tests/megatron/test_checkpoints.py",
    "tests/megatron/test_example.py",
    "tests/megatron/test_faults.py",
    "tests/nodes/test_bad_values.py",
    "tests/nodes/test_lost_nodes.py",
    "tests/recovery/test_exploration.py",
    "tests/report/test_timeline.py::test_pictures",
    "tests/sharding/test_gradients.py",
    "tests/sharding/test_grids.py",
    "tests/sharding/test_manual.py",
    "tests/sharding/test_moving.py",
    "tests/sharding/test_optimizers.py",
    "tests/sharding/test_parameters.py",
    "tests/sharding/test_peers.py",
    "tests/sharding/test_references.py",
    "tests/sharding/test_state.py",
    "tests/state/data",
    "tests/state/test_logger_runs.py",
    "tests/stores/test_etcd.py",
    "tests/stores/test_etcd_members.py",
    "tests/stores/test_etcd_requests.py",
    "tests/test_bad_input.py",
    "tests/trainer",
    "tests/wild",
)

CASES = (
    "tests/callbacks/test_hooks.py::test_on_all_ranks_in_order_with_own_state_and_group",
    "tests/checkpoint/test_kills.py::test_nothing_gets_its_name_before_it_is_on_the_disk",
    "tests/checkpoint/test_sharded.py::test_survivors_write_what_their_peers_had",
    "tests/compat/test_packages.py::test_a_killed_rank_under_either_package",
    "tests/compat/test_packages.py::test_a_name_in_the_other_package",
    "tests/faults/test_hopeless.py::test_no_replacement_can_be_had[0]",
    "tests/faults/test_matrix.py::test_one_fault_after_the_other",
    "tests/faults/test_npu.py::test_an_error_that_may_be_in_every_shard[True]",
    "tests/faults/test_npu.py::test_what_takes_the_process[0]",
    "tests/faults/test_wrong_bits.py::test_an_update_that_went_wrong_with_two_holders",
    "tests/launch/test_hang.py::test_a_stopped_rank[reduction-3]",
    "tests/launch/test_script.py::test_a_killed_rank_comes_back[1-0]",
    "tests/recovery/test_exploration.py::test_faults_anywhere[2-2-2-True-True-True-first0]",
    "tests/sharding/test_grids.py::test_each_grid_trains_as_it_does_alone",
    "tests/sharding/test_state.py::test_an_element_wise_optimizer_trains_as_under_ddp[AdamW]",
    "tests/state/data/test_replaced.py::test_a_replaced_rank_reads_the_same_data[stream]",
    "tests/trainer/saving/test_dying_gasp.py::test_every_rank_raises_while_its_shard_changes",
    "tests/trainer/saving/test_last.py::test_a_fit_goes_on_and_repeats_no_batch",
    "tests/trainer/test_ddp.py::test_two_ranks_end_with_the_bits_of_ddp[0]",
)


def is_quick(test: str) -> bool:
    """Whether a test, by its node id, is in the quick tier."""
    return not test.startswith(LONG) or test.startswith(CASES)


def unknown(tests: list[str]) -> list[str]:
    """Return what `LONG` and `CASES` name that no test is called any more."""
    return [name for name in (*LONG, *CASES) if not any(test.startswith(name) for test in tests)]
