"""Notes on single names in docs/megatron-compat.md. page_head.md has the text before the table."""

# Names that megackpt does not have, and what replaces them.
RENAMED: dict[str, str] = {
    "validation.StrictHandling.requires_explicit_ckpt_mismatch_check": (
        "A load always compares its request with the index; `StrictHandling.on_unexpected` says what follows."
    ),
    "validation.StrictHandling.requires_global_app_metadata": "`StrictHandling.looks_for_missing_keys`.",
    "validation.StrictHandling.requires_returning_mismatch_keys": "`StrictHandling.returns_keys`.",
    "strategies.zarr.numpy_to_torch_dtype_dict": "`megackpt.metadata.DTYPES`.",
    "strategies.zarr.torch_to_numpy_dtype_dict": "`megackpt.metadata.DTYPES`.",
}

_STAGES = (
    "An internal step of Megatron-Core's writer. `get_save_function_and_args` returns the function that "
    "writes."
)

# Names that megackpt does not have, and why.
ABSENT: dict[str, str] = {
    "strategies.filesystem_async.FileSystemWriterAsync.preload_tensors": _STAGES,
    "strategies.filesystem_async.FileSystemWriterAsync.prepare_decentralized_global_plan": _STAGES,
    "strategies.filesystem_async.FileSystemWriterAsync.write_preloaded_data": _STAGES,
    "strategies.filesystem_async.FileSystemWriterAsync.write_preloaded_data_multiproc": _STAGES,
    "strategies.filesystem_async.FileSystemWriterAsync.write_preloaded_data_multithread": _STAGES,
    "strategies.torch.HAVE_NVRX": (
        "Says whether an import worked; `strategies.nvrx.is_nvrx_min_version` checks the installed version."
    ),
    "exchange_utils.HAVE_TE_FLOAT8TENSOR": (
        "Says whether an import worked; `is_float8tensor` checks the class and imports nothing."
    ),
    "strategies.fully_parallel.FullyParallelLoadStrategyWrapper.fill_in_deferred_sharded_objects": (
        "Nothing is deferred: the load fills the tensors of the rank."
    ),
    "strategies.fully_parallel.FullyParallelLoadStrategyWrapper.fill_in_deferred_sharded_tensors": (
        "Nothing is deferred: the load fills the tensors of the rank."
    ),
    "strategies.fully_parallel.FullyParallelLoadStrategyWrapper.exchange_loaded_tensors_broadcast": (
        "The load engine makes the exchange; `exchange_algo` selects the algorithm."
    ),
    "strategies.fully_parallel.FullyParallelLoadStrategyWrapper.exchange_loaded_tensors_gather_object": (
        "The load engine makes the exchange; `exchange_algo` selects the algorithm."
    ),
    "strategies.fully_parallel.FullyParallelLoadStrategyWrapper.exchange_loaded_tensors_gather_rounds": (
        "The load engine makes the exchange; `exchange_algo` selects the algorithm."
    ),
}

_PROPERTY = "A property, as in its base class; Megatron-Core's method has no decorator."
_BACKEND = "The argument is a backend, and has this name in the base class, too."

# Notes on names that megackpt has. Every signature that differs needs one.
NOTES: dict[str, str] = {
    "core.check_is_distributed_checkpoint": (
        "Takes a path, or a Store of megackpt. Damaged JSON in metadata.json is an error."
    ),
    "core.maybe_load_config": "Fields of metadata.json that Megatron-Core does not know are left out.",
    "core.save_config": "Raises UnsupportedError: metadata.json is the commit, and `save` writes it.",
    "mapping.ShardedTensor.from_rank_offsets": (
        "`init_kwargs` takes only `allow_shape_mismatch`; flat shards have `from_rank_offsets_flat`. A "
        "repeated axis is an error."
    ),
    "mapping.ShardedTensor.from_rank_offsets_flat": "The same arguments, spelled out.",
    "mapping.apply_factory_merges": "Errors are DeclarationErrors, which are ValueErrors.",
    "optimizer.get_param_id_to_sharded_param_map": "Entities with detached copies are an error.",
    "optimizer.optim_state_to_sharding_state": "Also takes states of any shape, and numbers.",
    "serialization.load": (
        "The fourth positional argument is that of the version that the program uses. `strict` decides "
        "about keys, see `StrictHandling`. `validate_access_integrity` has no effect: a load does not depend "
        "on the requests of other ranks, so a request for a part of an array is no error. Errors are raised "
        "on every rank. Another dtype or shape than the stored one is an error; `install(silent_cast=True)` "
        "allows conversion of values. For keys that are not stored, and for shapes that "
        "differ, the error is also torch's `CheckpointException`."
    ),
    "serialization.save": (
        "The fourth positional argument is that of the version that the program uses. `async_strategy` has "
        "no effect. Makes the directory, does not change the state dict or its entities, and writes format "
        "`megackpt` without a strategy. Common state that differs between ranks is an error, and so is a "
        "value without a codec (nothing is pickled). Errors are raised on every rank. "
        "With `async_sharded_save`, tensors are read when the request is scheduled."
    ),
    "serialization.get_default_save_sharded_strategy": (
        "Without arguments it is `torch_dist`, which Megatron-Core reads; `save` without a strategy writes "
        "`megackpt`."
    ),
    "serialization.load_plain_tensors": "An error of one rank is raised on all, after all have read.",
    "serialization.load_common_state_dict": (
        "Has the content metadata under `content_metadata`, as in Megatron-Core."
    ),
    "serialization.remove_sharded_tensors": "Atomic; one process calls it.",
    "state_dict_utils.save_preprocess": "Does not change the given state dict.",
    "strategies.async_utils.AsyncCallsQueue.schedule_async_request": (
        "Saves of megackpt go to a writer process, which is kept; other functions are called in a thread."
    ),
    "strategies.async_utils.AsyncCallsQueue.maybe_finalize_async_calls": (
        "A failure on one rank is raised on all; the request is then no longer in the queue."
    ),
    "strategies.async_utils.AsyncRequest": "Later versions put three fields before `is_frozen`.",
    "strategies.base.LoadStrategyBase": "Megatron-Core's constructor only logs that it is deprecated.",
    "strategies.base.LoadStrategyBase.check_backend_compatibility": _BACKEND,
    "strategies.base.get_default_strategy": (
        "For a load, every format returns the strategy that detects the format."
    ),
    "strategies.common.TorchCommonLoadStrategy.check_backend_compatibility": _BACKEND,
    "strategies.common.TorchCommonSaveStrategy.can_handle_sharded_objects": _PROPERTY,
    "strategies.common.TorchCommonSaveStrategy.save_common": (
        "Called together with a user's sharded strategy; megackpt's formats store common state themselves."
    ),
    "strategies.fully_parallel.FullyParallelLoadStrategyWrapper": (
        "`exchange_algo` may also be `all_to_all`. Objects are exchanged, too. Every load makes its own "
        "plan, for any `do_cache_distribution`. Around a user's strategy nothing is exchanged."
    ),
    "strategies.fully_parallel.FullyParallelLoadStrategyWrapper.check_backend_compatibility": _BACKEND,
    "strategies.filesystem_async.FileSystemWriterAsync": (
        "torch's own writer in stages, for `torch_dcp` and `fsdp_dtensor`; `separation_hint` and `use_msc` "
        "have no effect."
    ),
    "strategies.state_dict_saver.save_state_dict_async_plan": (
        "Returns the arguments of `save_state_dict_async_finalize`, as nvidia-resiliency-ext does; "
        "Megatron-Core's function also returns its plans. Plans are not kept."
    ),
    "strategies.fully_parallel.FullyParallelSaveStrategyWrapper": (
        "Chunks of several ranks are spread over the owners in the main replica's group, or over all owners "
        "without a group. `do_cache_distribution` keeps plans."
    ),
    "strategies.fully_parallel.determine_main_replica_uniform_distribution": (
        "`is_loading` of 0.8 is called `ignore_groups`, as in later versions."
    ),
    "strategies.fully_parallel.FullyParallelSaveStrategyWrapper.async_save": (
        "A request for a whole checkpoint."
    ),
    "strategies.two_stage.TwoStageDataParallelLoadShardedStrategy": (
        "Loads any format, with objects, by an exchange plan; `times` has the times of the last load. If a "
        "subclass replaces steps, `load` calls the steps, one chunk after the other."
    ),
    "strategies.two_stage.TwoStageDataParallelLoadShardedStrategy.load_tensor_from_storage": (
        "Opens the checkpoint again for each chunk."
    ),
    "strategies.two_stage.TwoStageDataParallelLoadShardedStrategy.summarize_load_times": (
        "Logs the phases over all ranks, and the maximum and mean of all `timers`, also of those that only "
        "some ranks have. Megatron-Core could hang on these."
    ),
    "strategies.resharding.is_nd_flattened_tensor": "Also true for one-dimensional arrays, as in 0.12.",
    "exchange_utils.ShardDistribution": "Plain data; `all_ranks_for_shard` may be left out, as in 0.8.",
    "strategies.torch.TorchDistLoadShardedStrategy": "Detects the format, and reads those that megackpt "
    "reads.",
    "strategies.torch.TorchDistLoadShardedStrategy.can_handle_sharded_objects": _PROPERTY,
    "strategies.torch.TorchDistLoadShardedStrategy.check_backend_compatibility": _BACKEND,
    "strategies.tensorstore.TensorStoreLoadShardedStrategy.check_backend_compatibility": _BACKEND,
    "strategies.zarr.ZarrLoadShardedStrategy.check_backend_compatibility": _BACKEND,
    "strategies.torch.TorchDistLoadShardedStrategy.load_tensors_metadata": (
        "`metadata` is that of torch.distributed.checkpoint; this method does not read it."
    ),
    "strategies.torch.TorchDistSaveShardedStrategy": (
        "The default of `thread_count` is 1 from 0.17 on; it is 2 in megackpt and in earlier versions."
    ),
    "strategies.torch.TorchDistSaveShardedStrategy.async_save": "A request for a whole checkpoint.",
    "strategies.torch.TorchDistSaveShardedStrategy.can_handle_sharded_objects": _PROPERTY,
    "strategies.checkpointable.CheckpointableShardedTensor": (
        "For programs that call torch.distributed.checkpoint. Prepended axes have extent 1 in the stored "
        "chunk; a flat range is an error."
    ),
    "strategies.checkpointable.LocalShardsContainer": "Shards of different arrays are an error.",
    "strategies.torch.MCoreLoadPlanner": (
        "For programs that call torch.distributed.checkpoint. Does not change the metadata that it is given."
    ),
    "utils.logger_stack": "Nested per thread.",
    "validation.StrictHandling": "The same modes and values.",
    "validation.validate_sharding_integrity": (
        "Raises on every rank, also if common state differs. In Megatron-Core only rank 0 raises, and a "
        "difference in common state is logged."
    ),
}
