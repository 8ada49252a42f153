"""What docs/megatron-compat.md says of single names; page_head.md is what it says before the table."""

# Names that are not here, and what does their work.
RENAMED: dict[str, str] = {
    "validation.StrictHandling.requires_explicit_ckpt_mismatch_check": (
        "A load always compares its request with the index; what follows is `StrictHandling.on_unexpected`."
    ),
    "validation.StrictHandling.requires_global_app_metadata": "`StrictHandling.looks_for_missing_keys`.",
    "validation.StrictHandling.requires_returning_mismatch_keys": "`StrictHandling.returns_keys`.",
    "strategies.zarr.numpy_to_torch_dtype_dict": "`megackpt.metadata.DTYPES`.",
    "strategies.zarr.torch_to_numpy_dtype_dict": "`megackpt.metadata.DTYPES`.",
}

_STAGES = (
    "A step inside of the writer there. `get_save_function_and_args` gives the one function that writes."
)

# Names that are not here, and why.
ABSENT: dict[str, str] = {
    "strategies.filesystem_async.FileSystemWriterAsync.preload_tensors": _STAGES,
    "strategies.filesystem_async.FileSystemWriterAsync.prepare_decentralized_global_plan": _STAGES,
    "strategies.filesystem_async.FileSystemWriterAsync.write_preloaded_data": _STAGES,
    "strategies.filesystem_async.FileSystemWriterAsync.write_preloaded_data_multiproc": _STAGES,
    "strategies.filesystem_async.FileSystemWriterAsync.write_preloaded_data_multithread": _STAGES,
    "strategies.torch.HAVE_NVRX": (
        "Says whether an import worked; `strategies.nvrx.is_nvrx_min_version` asks for the installed version."
    ),
    "exchange_utils.HAVE_TE_FLOAT8TENSOR": (
        "Says whether an import worked; `is_float8tensor` looks at the class and imports nothing."
    ),
    "strategies.fully_parallel.FullyParallelLoadStrategyWrapper.fill_in_deferred_sharded_objects": (
        "Nothing is deferred: what a rank needs arrives in its tensors."
    ),
    "strategies.fully_parallel.FullyParallelLoadStrategyWrapper.fill_in_deferred_sharded_tensors": (
        "Nothing is deferred: what a rank needs arrives in its tensors."
    ),
    "strategies.fully_parallel.FullyParallelLoadStrategyWrapper.exchange_loaded_tensors_broadcast": (
        "The engine exchanges: `exchange_algo` says how."
    ),
    "strategies.fully_parallel.FullyParallelLoadStrategyWrapper.exchange_loaded_tensors_gather_object": (
        "The engine exchanges: `exchange_algo` says how."
    ),
    "strategies.fully_parallel.FullyParallelLoadStrategyWrapper.exchange_loaded_tensors_gather_rounds": (
        "The engine exchanges: `exchange_algo` says how."
    ),
}

_PROPERTY = "A property, as in its base class; there the decorator is missing."
_BACKEND = "It is given a backend, and is named so in its base class too."

# What to know of names that are here. Every signature that differs needs one.
NOTES: dict[str, str] = {
    "core.check_is_distributed_checkpoint": (
        "Takes a path, or a Store of megackpt. Damaged JSON in metadata.json is an error."
    ),
    "core.maybe_load_config": "Fields of metadata.json that Megatron-Core does not know are left out.",
    "core.save_config": "Raises UnsupportedError: metadata.json is the commit, and `save` writes it.",
    "mapping.ShardedTensor.from_rank_offsets": (
        "`allow_shape_mismatch` is all that was left to give in `init_kwargs`; flat shards have "
        "`from_rank_offsets_flat`. An axis given twice is an error."
    ),
    "mapping.ShardedTensor.from_rank_offsets_flat": "The same arguments, spelled out.",
    "mapping.apply_factory_merges": "Errors are DeclarationErrors, which are ValueErrors.",
    "optimizer.get_param_id_to_sharded_param_map": "Entities that hold detached copies are an error.",
    "optimizer.optim_state_to_sharding_state": "Takes 0-dim states, such as Adam's `step`, too.",
    "serialization.load": (
        "A call by position may leave out `common_strategy`, as from 0.19 on. Keys by `strict`, "
        "see `StrictHandling`; `validate_access_integrity` has no effect, as a load is not "
        "harmed by what other ranks leave out. Errors are raised on every rank. Another dtype or shape than "
        "stored is an error; `install(silent_cast=True)` lets values be converted. What is asked for and not "
        "stored, and shapes that do not fit, raise an error that is also torch's `CheckpointException`."
    ),
    "serialization.save": (
        "A call by position may leave out `common_strategy`, as from 0.19 on. `async_strategy` has no "
        "effect. Makes the directory, changes neither the state dict nor its entities, and writes format "
        "`megackpt` if "
        "no strategy is given. Common state that differs between ranks is an error, and so is a value "
        "without "
        "a codec (nothing is pickled). Errors are raised on every rank. "
        "With `async_sharded_save` tensors are read when the request is scheduled."
    ),
    "serialization.get_default_save_sharded_strategy": (
        "Without arguments it is `torch_dist`, which Megatron-Core reads; `save` without a strategy writes "
        "`megackpt`."
    ),
    "serialization.load_plain_tensors": "An error of one rank is raised on all, after all have read.",
    "serialization.load_common_state_dict": "Has the content metadata under `content_metadata`, as there.",
    "serialization.remove_sharded_tensors": "Atomic; one process calls it.",
    "state_dict_utils.save_preprocess": "The given state dict is not changed.",
    "strategies.async_utils.AsyncCallsQueue.schedule_async_request": (
        "Saves of ours go to a writer process, which is kept; other functions are called in a thread."
    ),
    "strategies.async_utils.AsyncCallsQueue.maybe_finalize_async_calls": (
        "A failure on one rank is raised on all; the request is then no longer in the queue."
    ),
    "strategies.async_utils.AsyncRequest": "Later versions put three fields before `is_frozen`.",
    "strategies.base.LoadStrategyBase": "Its own constructor there only logs that it is deprecated.",
    "strategies.base.LoadStrategyBase.check_backend_compatibility": _BACKEND,
    "strategies.base.get_default_strategy": "To load, any format gives the strategy that detects the format.",
    "strategies.common.TorchCommonLoadStrategy.check_backend_compatibility": _BACKEND,
    "strategies.common.TorchCommonSaveStrategy.can_handle_sharded_objects": _PROPERTY,
    "strategies.common.TorchCommonSaveStrategy.save_common": (
        "Called together with a sharded strategy of a user; our formats store common state by themselves."
    ),
    "strategies.fully_parallel.FullyParallelLoadStrategyWrapper": (
        "`exchange_algo` may also be `all_to_all`. Objects are exchanged too. Every load makes its own plan, "
        "whatever `do_cache_distribution` says. Around a strategy of a user's nothing is exchanged."
    ),
    "strategies.fully_parallel.FullyParallelLoadStrategyWrapper.check_backend_compatibility": _BACKEND,
    "strategies.filesystem_async.FileSystemWriterAsync": (
        "torch's own writer in stages, for `torch_dcp` and `fsdp_dtensor`; `separation_hint` and `use_msc` "
        "have no effect."
    ),
    "strategies.state_dict_saver.save_state_dict_async_plan": (
        "Returns what `save_state_dict_async_finalize` is given, as nvidia-resiliency-ext does; "
        "Megatron-Core's own returns its plans too. Plans are not kept."
    ),
    "strategies.fully_parallel.FullyParallelSaveStrategyWrapper": (
        "Chunks that several ranks hold are spread over those in the main replica's group, or over all ranks "
        "without a group. `do_cache_distribution` keeps plans."
    ),
    "strategies.fully_parallel.determine_main_replica_uniform_distribution": (
        "`is_loading` of 0.8 is called `ignore_groups`, as in later versions."
    ),
    "strategies.fully_parallel.FullyParallelSaveStrategyWrapper.async_save": (
        "A request for a whole checkpoint."
    ),
    "strategies.two_stage.TwoStageDataParallelLoadShardedStrategy": (
        "Loads any format, objects too, by an exchange plan; `times` has the times of the last load. Where a "
        "subclass replaces steps, `load` takes the steps, one chunk after the other."
    ),
    "strategies.two_stage.TwoStageDataParallelLoadShardedStrategy.load_tensor_from_storage": (
        "Opens the checkpoint anew for each chunk."
    ),
    "strategies.two_stage.TwoStageDataParallelLoadShardedStrategy.summarize_load_times": (
        "Logs the phases over all ranks, and the most and mean of all `timers`, also of those that only some "
        "ranks have: there it could hang."
    ),
    "strategies.resharding.is_nd_flattened_tensor": "True of one-dimensional arrays too, as in 0.12.",
    "exchange_utils.ShardDistribution": "Plain data; `all_ranks_for_shard` may be left out, as in 0.8.",
    "strategies.torch.TorchDistLoadShardedStrategy": "Detects the format, and reads those that megackpt "
    "reads.",
    "strategies.torch.TorchDistLoadShardedStrategy.can_handle_sharded_objects": _PROPERTY,
    "strategies.torch.TorchDistLoadShardedStrategy.check_backend_compatibility": _BACKEND,
    "strategies.tensorstore.TensorStoreLoadShardedStrategy.check_backend_compatibility": _BACKEND,
    "strategies.zarr.ZarrLoadShardedStrategy.check_backend_compatibility": _BACKEND,
    "strategies.torch.TorchDistLoadShardedStrategy.load_tensors_metadata": (
        "`metadata` is that of torch.distributed.checkpoint, which is not read here."
    ),
    "strategies.torch.TorchDistSaveShardedStrategy": "`thread_count` is 1 from 0.17 on, 2 here and before.",
    "strategies.torch.TorchDistSaveShardedStrategy.async_save": "A request for a whole checkpoint.",
    "strategies.torch.TorchDistSaveShardedStrategy.can_handle_sharded_objects": _PROPERTY,
    "utils.logger_stack": "Nested per thread.",
    "validation.StrictHandling": "The same modes and values.",
    "validation.validate_sharding_integrity": (
        "Raises on every rank, also where common state differs; there rank 0 raises, and a difference is "
        "logged."
    ),
}
