"""What users can rely on: sentences of the docs, word for word, and the tests that fail if one is not true.

`python -m tests.guarantees` writes docs/guarantees.md. A test has its name only; if several files have a
function of that name, it is `file.py::name`.
"""

from __future__ import annotations

from tests.support.guarantee_page import PAGE, Guarantees, page

GUARANTEES: Guarantees = {
    "README.md": {
        (
            "A checkpoint saved at one layout of tensor, pipeline, data, context and expert parallelism "
            "loads at any other layout, bit for bit."
        ): [
            "test_law.py::test_any_layout_loads_what_any_other_saved",
            "test_any_world_loads_what_any_other_saved_of_all_entities",
            "test_layout_pairs.py::test_what_one_layout_saved_another_loads_and_saves_bit_equal",
        ],
        "Every rank writes and reads its own part in parallel.": [
            "test_a_fully_parallel_save_of_replicated_state_writes_each_byte_once_and_evenly",
            "test_a_fully_parallel_load_reads_each_byte_once_and_a_direct_one_on_every_rank",
        ],
        "A save becomes visible all at once or not at all": [
            "test_a_crash_at_any_moment_of_a_save_leaves_the_old_checkpoint_or_the_new_one",
            "test_a_save_that_fails_at_any_operation_leaves_the_old_checkpoint_and_nothing_else",
            "test_a_kill_at_any_moment_leaves_the_last_committed_step_loadable",
        ],
        "every block is checked against a digest when it is read": [
            "test_a_flipped_bit_is_found_and_named_by_key_file_and_range",
            "test_any_damage_is_harmless_or_named",
        ],
        "no file is a pickle": ["test_no_file_of_a_save_is_a_pickle"],
        "`torch_dist` (DCP, Megatron-Core) and `zarr`, read and written": [
            "test_any_layout_loads_what_any_other_saved_as_torch_dist",
            "test_any_layout_loads_what_any_other_saved_as_zarr",
            "test_stock_dcp_loads_every_array_bit_for_bit",
            "test_all_dtypes_and_shapes_are_read_by_stock_zarr_and_tensorstore",
        ],
    },
    "docs/operating.md": {
        "takes the newest committed step, at any number of ranks": [
            "test_the_newest_committed_step_is_loaded_and_any_other_on_demand",
            "test_two_ranks_continue_what_four_have_begun",
        ],
        "A load never returns bytes whose digest is wrong.": [
            "test_a_flipped_bit_is_found_and_named_by_key_file_and_range",
            "test_any_damage_is_harmless_or_named",
            "test_damage_in_the_chunk_of_one_rank_is_raised_on_all",
        ],
        "every element has exactly one main replica; common state is equal on all ranks": [
            "test_a_fault_is_found_on_every_rank_and_named_before_anything_is_written",
            "test_common_state_that_differs_is_named_by_path_and_rank",
        ],
        (
            "So two files of one parity group that are damaged at the same position give an error, not "
            "wrong numbers."
        ): ["test_a_second_damage_at_the_same_position_is_an_error_and_not_a_value"],
        "A copy of another save is not used.": [
            "test_a_copy_of_another_save_is_not_used_and_the_error_names_all_that_were_tried",
            "test_a_copy_of_another_save_does_not_replace_a_lost_index",
        ],
        "All ranks go back together, step by step.": [
            "test_all_ranks_go_back_to_the_same_older_step_where_one_cannot_load",
            "test_ranks_go_back_to_one_step_of_those_they_saved_asynchronously",
        ],
        (
            "So any single file of a group can be computed from the others if it is lost, truncated or "
            "damaged."
        ): [
            "test_any_range_of_any_file_is_rebuilt_whatever_became_of_it",
            "test_any_damage_to_one_data_file_is_recovered_by_parity",
            "test_ranks_rebuild_a_lost_file",
        ],
        "If nothing is damaged, a load opens no source and exchanges the same messages as any other load.": [
            "test_a_load_without_damage_opens_no_source_and_sends_no_more_messages"
        ],
        "If ranks that declare the same chunk have different samples, the save raises a `MismatchError`": [
            "test_a_parameter_that_tp_cuts_undeclared_is_named_with_its_ranks_and_the_remedy",
            "test_the_begin_the_middle_and_the_end_are_sampled",
        ],
        "So every save compares samples of the chunks that several ranks declare": [
            "test_a_copy_of_which_every_element_drifts_is_found_at_the_next_save",
            "test_one_element_in_4096_that_drifts_is_found_within_64_saves",
            "test_any_64_saves_sample_every_sequence_of_a_1024th",
            "test_ranks_find_copies_that_differ_in_any_save",
        ],
        "Objects that several ranks declare, such as random states, are compared as a whole": [
            "test_objects_that_differ_are_named_at_once",
            "test_ranks_find_copies_that_differ_in_any_save",
        ],
        "With a cached plan, the comparison takes no message": [
            "test_a_comparison_takes_no_collective_and_no_longer_message",
            "test_the_comparison_of_copies_takes_no_collective",
        ],
        "compares the digests before anything is written": [
            "test_copies_that_differ_are_named_on_all_ranks_and_nothing_is_written",
        ],
        "can show that two checkpoints of different layouts are equal without reading their data": [
            "test_diff_does_not_read_arrays_whose_digests_are_equal",
            "test_a_save_at_any_layout_stores_the_digest_of_the_array",
            "test_a_checkpoint_that_moved_to_another_layout_is_proved_equal_without_being_read",
        ],
        "If some damage cannot be repaired, nothing is changed": [
            "test_nothing_is_changed_if_something_cannot_be_repaired"
        ],
        (
            "After a crash at any moment, each file is the old one or the new one, and every new one is "
            "right."
        ): ["test_a_crash_at_any_moment_of_a_repair_makes_nothing_worse"],
    },
    "docs/security.md": {
        "No code of the checkpoint runs.": [
            "test_a_pickle_that_names_a_function_raises_an_error_with_its_name_and_is_not_run",
            "test_codec_classes.py::test_no_code_of_a_class_or_module_runs",
            "test_codec_named_tuples.py::test_no_code_of_a_class_or_module_runs",
            "test_no_crafted_directory_gets_anywhere",
            "test_no_crafted_pickle_gets_anywhere",
        ],
        "Nothing outside the directory is read.": [
            "test_a_linked_file_is_never_read",
            "test_a_link_out_of_the_checkpoint_raises_an_error",
            "test_no_crafted_directory_gets_anywhere",
        ],
        "A false size allocates no memory.": [
            "test_an_object_that_is_longer_than_its_file_raises_an_error_before_memory_is_taken",
            "test_a_pickle_that_would_take_more_memory_than_it_has_bytes_raises_an_error",
            "test_no_crafted_directory_gets_anywhere",
        ],
        "The time is proportional to the size of the checkpoint.": [
            "test_twice_as_much_takes_about_twice_as_long",
            "test_keys_that_crowd_a_table_are_rejected_and_multiples_are_not",
        ],
        "with the values that were saved, or with an error of megackpt that names the file or the key": [
            "test_a_hostile_value_leads_to_an_error_of_ours_or_to_a_load",
            "test_any_damage_is_harmless_or_named",
        ],
        "no class, function, member of an enumeration or module of the process changes": [
            "test_what_a_pickle_gets_by_a_name_cannot_be_changed",
            "test_what_the_bytes_of_a_storage_give_cannot_be_changed",
        ],
        "The originals are never made, called or looked up.": [
            "test_nothing_that_a_carried_name_names_is_run"
        ],
        "The command `megackpt` imports nothing from there.": [
            "test_the_console_script_takes_nothing_from_the_current_directory"
        ],
    },
    "docs/loading.md": {
        (
            "one rank of the `exchange_group` reads each byte and sends the others exactly the elements "
            "that they need"
        ): [
            "test_a_rank_is_sent_what_it_needs_and_no_more",
            "test_any_way_loads_what_direct_reading_loads",
            "test_a_fully_parallel_load_reads_each_byte_once_and_a_direct_one_on_every_rank",
        ],
        "A load converts, pads or leaves out a value only if you allow it.": [
            "test_a_cast_is_an_error_unless_a_rule_allows_it",
            "test_shapes_may_differ_by_flag_or_by_rule_padded_with_zeros_or_cut_per_axis",
            "test_an_unexpected_key_is_an_error_and_nothing_is_read",
        ],
        "These errors are raised before any byte of a tensor is read.": [
            "test_an_unexpected_key_is_an_error_and_nothing_is_read",
            "test_a_cast_is_an_error_unless_a_rule_allows_it",
            "test_what_is_not_complete_is_an_error_that_names_it",
        ],
        (
            "that the ranks together request every stored key, and every element of every array from "
            "exactly one main replica"
        ): ["test_incomplete_loads.py::test_what_is_not_complete_is_an_error_that_names_it"],
        "each value gets to the right position": [
            "test_casts_convert_values_also_of_resharded_and_flat_chunks"
        ],
        "Rank 0 logs each warning of a load once, for all ranks.": [
            "test_each_warning_of_a_load_is_logged_once"
        ],
        (
            "Before a load reads anything, it proves that the checkpoint has every element that this "
            "rank asks for."
        ): ["test_a_load_gives_what_is_stored_or_raises", "test_an_overlap_does_not_hide_a_gap"],
        "Each element comes from the last chunk that has it": [
            "test_of_overlapping_chunks_the_last_is_loaded"
        ],
        "Otherwise it raises a `MismatchError` on every rank that names both keys": [
            "test_two_keys_into_one_tensor_raise_an_error_on_every_rank_where_their_values_differ"
        ],
    },
    "docs/async-saves.md": {
        "A writer process of each rank writes and commits it while training goes on.": [
            "test_a_step_has_the_state_at_the_call_while_training_goes_on",
            "test_an_asynchronous_save_does_what_a_synchronous_one_does",
        ],
        "The copy is ordered after the work on the caller's stream.": [
            "test_a_tensor_still_being_computed_is_staged_complete",
            "test_a_tensor_may_change_as_soon_as_save_returns",
        ],
        (
            "The error of one rank is raised on all ranks at their next `save`, `wait`, `poll`, `load` "
            "or `close`."
        ): ["test_a_failure_of_a_writer_is_raised_on_all_ranks_and_the_next_save_works"],
        "The training state and earlier steps do not change, and the next `save` works.": [
            "test_a_crash_of_writers_at_any_moment_leaves_the_old_checkpoint_or_the_new_one",
            "test_training_survives_a_writer_that_is_killed",
            "test_a_writer_process_killed_at_any_operation_loses_nothing",
        ],
        "its writer ends with it, so it cannot commit while a restarted job writes": [
            "test_nothing_survives_a_training_process_that_is_killed"
        ],
        "A slow disk may take as long as it needs.": [
            "test_a_writer_that_is_slow_and_makes_progress_is_not_given_up"
        ],
        "it counts as stuck and is killed, even if it is the only rank": [
            "test_a_writer_that_is_alone_and_makes_no_progress_is_given_up_also_if_it_cannot_be_killed"
        ],
    },
    "docs/checkpointer.md": {
        "If they differ, all ranks raise the same `DeclarationError`.": [
            "test_checkpointers_that_differ_are_an_error_on_all_ranks_before_anything_is_done"
        ],
        "if it names a step that is not committed, that step is not loaded": [
            "test_the_tracker_names_the_newest_commit_and_is_never_trusted"
        ],
        "After a crash at any moment, even a loss of power, every step that should be kept is there.": [
            "test_a_crash_at_any_moment_of_a_retention_pass_loses_nothing_that_should_stay"
        ],
        (
            "If one rank has received the signal, all ranks learn of it in the next exchange, and save "
            "the same step."
        ): [
            "test_a_signal_at_one_rank_is_a_save_at_the_same_step_on_all",
            "test_a_signal_to_one_rank_saves_on_all_and_sigterm_ends_all",
        ],
        "The newest committed step, the last saved step, and pinned steps always stay.": [
            "test_last_every_best_and_pinned_steps_stay_also_after_a_restart",
            "test_what_was_saved_just_now_stays_although_a_newer_step_exists",
            "test_a_step_stays_exactly_if_something_asks_for_it",
        ],
        "So a committed step that both keep is not lost, and a mixture is never committed.": [
            "test_a_save_under_way_fails_when_another_commits_a_newer_step_and_no_committed_step_is_removed",
            "test_of_a_step_that_both_save_at_once_one_is_committed_whole",
        ],
        "The previous checkpoint stays as it was, and the files of the failed save are removed": [
            "test_a_save_that_fails_at_any_operation_leaves_the_old_checkpoint_and_nothing_else",
            "test_training_goes_on_after_a_failed_save_and_none_of_its_files_is_left",
        ],
        (
            "every byte of the new step is read, as by `megackpt verify --deep`, before an older step "
            "is removed"
        ): [
            "test_a_step_that_is_damaged_right_after_the_commit_is_removed_and_older_ones_stay",
            "test_each_rank_verifies_its_share_and_no_byte_is_read_twice",
            "test_writers_verify_what_they_have_committed_each_its_share",
        ],
        "It takes the newest step that is complete over all nodes of a tier, or in the root.": [
            "test_tiers_and_root_have_intervals_of_their_own_and_the_newest_step_of_all_wins",
            "test_other_layouts_and_fewer_nodes_take_the_newest_step_from_the_nodes_that_are_left",
        ],
        "With 2, any one node may be lost": [
            "test_each_byte_is_on_replication_factor_nodes_and_old_steps_are_removed",
            "test_tiers_are_written_asynchronously_and_survive_a_lost_node_a_full_one_and_a_lost_writer",
        ],
        "the load uses the undamaged copies": [
            "test_a_damaged_copy_is_not_used_and_the_other_one_is_read",
            "test_a_damaged_index_or_commit_of_one_node_is_replaced_by_that_of_another",
        ],
        "`metadata.json` is written on every node after all nodes have all data": [
            "test_a_job_killed_at_any_operation_of_a_save_has_the_old_step_or_the_new_one_without_any_node",
            "test_a_step_that_no_node_has_committed_is_never_loaded_and_is_removed",
        ],
        "Older steps stay, and the root gets its steps as before.": [
            "test_a_full_tier_is_a_warning_and_the_root_still_gets_its_step"
        ],
        "If a process is killed at any moment, the previous checkpoint is unchanged.": [
            "test_a_rank_that_is_killed_while_it_uploads_leaves_the_previous_checkpoint"
        ],
        (
            "Requests are repeated with back-off after a status 5xx (such as 500 and 503), a cut "
            "connection or a timeout"
        ): [
            "test_nothing_is_lost_when_a_request_of_any_kind_fails_once",
            "test_with_one_request_in_twenty_spoiled_nothing_is_lost",
        ],
        "It never quotes the response, because that may contain an access key.": [
            "test_credentials_appear_in_no_error"
        ],
        "A writer needs `(parts_in_flight + 1) * part_bytes`.": [
            "test_a_writer_uses_few_buffers_however_slow_the_store_is"
        ],
    },
    "docs/concepts.md": {
        "Entities are declarations: `save` and `load` read them and never change them.": [
            "test_neither_save_nor_load_changes_the_state_dict_it_is_given"
        ],
        "A save never sends the bytes of a tensor to another rank.": [
            "test_declaring_and_planning_flat_state_moves_nothing_proportional_to_it"
        ],
        "or a directory with files of other programs": ["test_directories_of_others_are_never_removed"],
        (
            "An error on one rank is raised on all ranks, as the class that this rank raised, with the "
            "number of the rank and the text."
        ): [
            "test_a_failure_of_one_rank_is_that_of_all",
            "test_real_ranks.py::test_an_error_of_one_rank_is_raised_on_all_and_names_it",
            "test_a_rank_that_raises_at_any_step_is_named_on_all",
        ],
        "the others raise a `RankFailedError` that names it, at the latest after twice `timeout_s`": [
            "test_a_rank_that_is_lost_at_any_step_is_named_before_the_deadline",
            "test_a_process_that_is_stopped_at_any_moment_is_named_by_all_others",
        ],
        "Ctrl-C raises `KeyboardInterrupt` at any point, and no later call waits for the interrupted one": [
            "test_ctrl_c_at_any_line_lets_nothing_hang_and_the_next_save_works",
            "test_ctrl_c_on_one_rank_lets_no_other_hang",
        ],
    },
    "docs/format.md": {
        "Stock DCP and Megatron-Core 0.16.1 read these checkpoints.": [
            "test_stock_dcp_loads_every_array_bit_for_bit",
            "test_stock_dcp_loads_values_that_are_no_tensors",
            "test_here_every_peer_reads_what_the_others_wrote_at_another_layout",
        ],
        "However the save ended, it loads the old checkpoint or the new one.": [
            "test_a_kill_between_any_two_operations_leaves_the_old_checkpoint_or_the_new_one"
        ],
        "**A missing chunk is an error**, not zeros.": [
            "test_a_chunk_that_is_missing_in_a_shard_is_an_error_and_not_the_fill_value",
            "test_every_missing_file_is_an_error_that_names_key_and_chunk",
        ],
        "a process needs at most 100 MiB more than its basic memory and the tensors of common state": [
            "test_converting_long_chunks_adds_at_most_100_mib",
        ],
        "If anything fails, nothing is left at DST.": [
            "test_a_target_that_fails_on_any_operation_is_left_without_a_checkpoint",
            "test_a_target_that_differs_when_it_is_read_is_removed",
        ],
        "This page is enough to write a reader.": [
            "test_the_reader_agrees_with_load_at_any_layout",
            "test_the_reader_fits_in_150_lines_and_imports_only_numpy",
        ],
        "Its presence makes the directory a checkpoint.": [
            "test_an_empty_or_half_written_directory_is_not_a_checkpoint"
        ],
        "Any other file stays.": [
            "test_overwriting_replaces_the_checkpoint_and_leaves_no_old_files_but_strangers"
        ],
        (
            "A reader of version 1 ignores fields of `metadata.json` and columns of the index that it "
            "does not know."
        ): ["test_fields_and_columns_of_a_newer_version_are_ignored"],
    },
    "docs/status.md": {
        "Sparse tensors and `complex32` are an error": [
            "test_a_tensor_without_elements_in_memory_cannot_be_saved"
        ],
        "Every later version reads every checkpoint that a released version has written": [
            "test_a_golden_checkpoint_loads",
            "test_there_is_a_golden_checkpoint_of_the_native_format",
        ],
        "it raises a `FormatError` that names it and those that it knows": [
            "test_an_unknown_format_or_version_raises_an_error_that_lists_the_known_ones"
        ],
        "No dependency has an upper bound": ["test_no_requirement_has_an_upper_bound"],
    },
    "docs/optimizers.md": {
        "A checkpoint of any form loads into any other, bit for bit in the masters, at any tp and dp": [
            "test_masters_are_the_same_bits_in_every_form_at_every_layout"
        ],
        "int16 is never cast to a float": ["test_a_load_does_not_cast_between_remainders_and_floats"],
        "*Exact* means bit for bit, on CPU.": [
            "test_optimizer_matrix.py::test_three_steps_after_a_load_equal_those_of_the_uninterrupted_run"
        ],
        "They never get the learning rate of another.": [
            "test_groups_keep_their_hyperparameters",
            "test_groups_that_were_made_differently_are_rejected",
            "test_groups_of_one_name_and_other_groups_are_errors",
        ],
    },
    "docs/training-state.md": {
        "No rank gets the state of another rank": [
            "test_at_the_same_layout_each_rank_gets_its_own_state",
            "test_at_another_layout_streams_are_an_error_unless_fresh_ones_are_asked_for",
        ],
        (
            "So any sequence of layouts and batch sizes visits every sample once in each epoch, in the "
            "same order."
        ): ["test_every_sample_comes_once_an_epoch_in_the_same_order_at_any_sequence_of_layouts"],
        "each shard continues with its new reader at exactly the same position": [
            "test_shards_that_change_their_readers_lose_and_repeat_nothing"
        ],
    },
    "docs/torch.md": {
        (
            "Uneven and empty shards, ranks outside the mesh, replicated, strided (FSDP over tensor "
            "parallelism) and reordered placements work."
        ): ["test_any_placement_loads_into_any_other", "test_ranks_without_elements_save_and_load"],
        "Equal copies are stored once; copies that differ are a `MismatchError`.": [
            "test_copies_on_meshes_that_do_not_know_of_each_other_are_compared_and_stored_once"
        ],
        "`load` returns the same values, on any number of ranks": [
            "test_a_module_and_its_optimizer_come_back",
        ],
        "it raises a `CommonStateError` that names paths and ranks": [
            "test_buffers_that_differ_are_named_and_rank_0s_can_be_taken"
        ],
    },
    "docs/models.md": {
        (
            "if a layer is on no stage or on two, or if ranks have different tables, every rank raises "
            "the same error before anything is read"
        ): [
            "test_what_is_on_no_rank_or_on_two_is_named_before_anything_is_written_or_loaded",
            "test_ranks_with_different_tables_are_named",
        ],
        "No key and no shape depends on the layout": [
            "test_weights_biases_and_moments_are_the_same_at_every_layout",
            "test_layout_pairs.py::test_what_one_layout_saved_another_loads_and_saves_bit_equal",
        ],
        "Without `capacity` no token is dropped.": ["test_without_a_capacity_every_choice_is_sent"],
        "a save raises the same error on all ranks before it writes anything": [
            "test_a_save_and_a_complete_load_name_the_experts",
            "test_what_is_on_no_rank_or_on_two_is_named_before_anything_is_written_or_loaded",
        ],
    },
    "docs/huggingface.md": {
        "In float32 the logits are those of transformers within 1e-5 of the largest": [
            "test_logits_are_those_of_transformers",
            "test_logits_of_several_ranks_are_those_of_transformers",
        ],
        "then no rank reads more than 1.05 times what it needs": ["test_ranks_read_what_they_need"],
        "A checkpoint that was imported gives the same tensors, bit for bit, when it is exported.": [
            "test_a_folder_becomes_our_arrays_and_the_same_folder_again"
        ],
        "so that its files are never mixed with new ones": [
            "test_a_model_that_is_replaced_is_never_mixed_with_the_new_one"
        ],
        "every element of both sides is in exactly one pair": [
            "test_a_fault_in_the_rules_is_always_found",
            "test_arrays_go_to_every_family_and_back_bit_for_bit",
        ],
    },
    "docs/fine-tuning.md": {
        "restores both at any other layout": [
            "test_adapters_and_their_optimizer_load_at_another_layout_bit_for_bit"
        ],
        "An adapter of another rank is an error that names both shapes.": [
            "test_an_adapter_of_another_rank_is_an_error_that_names_both_shapes"
        ],
    },
    "docs/megatron-compat.md": {
        "They are recognised by class and fields; the tensors are shared, so loading fills them in place.": [
            "test_every_field_is_taken_over_and_tensors_are_shared",
            "test_they_are_saved_and_loaded_like_ours",
        ],
        "A save does not change the state dict or its entities": ["test_an_unmodified_call_saves_and_loads"],
    },
    "docs/integrations.md": {
        "A run that was killed and resumed on as many processes ends with the same bits.": [
            "test_a_killed_run_goes_on_as_if_nothing_had_happened"
        ],
    },
    "docs/coming-from.md": {
        "bit for bit with what the ranks had": [
            "test_deepspeed_folders.py::test_every_array_is_bit_equal_with_what_the_ranks_had",
            "test_folders_that_deepspeed_makes_now_are_bit_equal",
        ],
    },
    "docs/commands.md": {
        "All damage is listed, with file, bytes, key and chunk.": [
            "test_every_flipped_block_is_named_with_key_box_file_and_bytes",
            "test_every_lost_file_is_damage",
        ],
        "With --deep every byte is also read, in limited memory, and compared with its digest": [
            "test_a_flipped_byte_in_the_middle_of_any_file_of_chunks_is_found",
            "test_an_undamaged_checkpoint_is_called_whole_only_if_every_byte_was_checked",
        ],
        (
            "The newest step, pinned steps, and the newest step without damage (without reading its chunks) "
            "are always kept"
        ): [
            "test_gc_removes_what_is_incomplete_and_what_the_policy_does_not_keep",
            "test_gc_keeps_a_damaged_newest_step_and_the_newest_undamaged_one",
        ],
    },
    "docs/errors.md": {
        "All errors of megackpt derive from `CheckpointError`.": [
            "test_every_error_class_of_the_package_is_exported"
        ],
    },
    "docs/transformer-engine.md": {
        "megackpt reads all three forms, and runs nothing": [
            "test_malicious_bytes_are_rejected_and_nothing_runs",
            "test_every_expert_of_every_era_keeps_its_own_numbers_at_another_ep",
        ],
        "At another ep, pp or order of layers every expert and layer gets its own numbers.": [
            "test_every_expert_of_every_era_keeps_its_own_numbers_at_another_ep",
            "test_experts_of_every_layer_keep_their_numbers_at_another_pp_and_order_of_layers",
        ],
    },
}
"""Pages, each with its sentences or parts of them, each with tests."""

EXCEPTIONS = {
    "The copy is ordered after the work on the caller's stream.": "streams need a GPU, and CI has none",
}
"""Guarantees without a test in CI, and why; the page has the reasons."""

if __name__ == "__main__":
    PAGE.write_text(page(GUARANTEES, EXCEPTIONS))
