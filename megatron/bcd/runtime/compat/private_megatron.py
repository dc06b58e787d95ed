"""Every part of Megatron Core 0.16.1 in use here that it does not document for users."""

from __future__ import annotations

from megatron.bcd.runtime.compat.private_api import PrivateApi

MEGATRON_APIS = (
    PrivateApi(
        "megatron.core.tensor_parallel.random",
        "CheckpointWithoutOutput.__init__",
        used_in="runtime.compat.norm_recomputation",
        use="the default of fp8",
        parameters="self, fp8",
        source=("fp8=False", "self.fp8 = fp8 is not None"),
    ),
    PrivateApi(
        "megatron.core.dist_checkpointing.core",
        "save_config",
        used_in="checkpoint.saver",
        use="metadata.json beside the shards",
        parameters="config, checkpoint_dir",
    ),
    PrivateApi(
        "megatron.core.dist_checkpointing.state_dict_utils",
        "save_preprocess",
        used_in="checkpoint.shard_writer",
        use="called as dist_checkpointing.save does",
        parameters="sharded_state_dict, validate_access_integrity, preprocess_common_before_consistancy_check",
    ),
    PrivateApi(
        "megatron.core.dist_checkpointing.strategies.filesystem_async",
        "FileSystemWriterAsync.prepare_write_data",
        used_in="checkpoint.shard_writer",
        use="the planned buckets",
        source=("self.write_buckets", "self.results_queue"),
    ),
    PrivateApi(
        "megatron.core.dist_checkpointing.strategies.filesystem_async",
        "FileSystemWriterAsync.write_preloaded_data",
        used_in="checkpoint.shard_writer",
        use="called to write one bucket",
        parameters="transform_list, local_proc_idx, write_bucket, results_queue, count_queue, use_fsync, **kwargs",
        source=("results_queue.put(",),
    ),
    PrivateApi(
        "megatron.core.dist_checkpointing.strategies.filesystem_async",
        "_get_write_results_queue",
        used_in="runtime.compat.checkpoint_writing",
        use="replaced by a queue of this process",
    ),
    PrivateApi(
        "megatron.core.dist_checkpointing.strategies.torch",
        "TorchDistSaveShardedStrategy._get_save_and_finalize_callbacks",
        used_in="runtime.compat.checkpoint_writing",
        use="overridden: plans without writing",
        parameters="self, writer, save_state_dict_ret",
        source=("AsyncRequest(",),
    ),
    PrivateApi(
        "megatron.core.distributed.distributed_data_parallel",
        "DistributedDataParallel.__init__",
        used_in="runtime.compat.megatron_phase",
        use="freeing a phase",
        source=("self.grad_accs", "self.use_forward_hook", "self.buffers"),
    ),
    PrivateApi(
        "megatron.core.distributed.distributed_data_parallel",
        "DistributedDataParallel.disable_forward_pre_hook",
        used_in="runtime.compat.megatron_phase",
        use="parameter gather outside of a forward pass",
        parameters="self, param_sync",
        source=("self.remove_forward_pre_hook_handles",),
    ),
    PrivateApi(
        "megatron.core.distributed.distributed_data_parallel",
        "DistributedDataParallel.enable_forward_pre_hook",
        used_in="runtime.compat.megatron_phase",
        use="the opposite",
        parameters="self",
        source=("self.remove_forward_pre_hook_handles",),
    ),
    PrivateApi(
        "megatron.core.distributed.param_and_grad_buffer",
        "",
        used_in="runtime.compat.cpu_kernels",
        use="replaced where the group has one rank",
        source=("dist_all_gather_func(", "dist_reduce_scatter_func("),
    ),
    PrivateApi(
        "megatron.core.distributed.param_and_grad_buffer",
        "_ParamAndGradBuffer.__init__",
        used_in="optim.state_bytes",
        use="counting bytes",
        source=("self.param_data", "self.grad_data"),
    ),
    PrivateApi(
        "megatron.core.models.common.embeddings.rope_utils",
        "",
        used_in="runtime.compat.cpu",
        use="its `torch` replaced: factories on the CPU",
        source=("import torch",),
    ),
    PrivateApi(
        "megatron.core.models.gpt.gpt_model",
        "GPTModel.__init__",
        used_in="model.builder",
        use="class of `decoder` replaced",
        source=("self.decoder = TransformerBlock(",),
    ),
    PrivateApi(
        "megatron.core.models.gpt.gpt_model",
        "GPTModel.forward",
        used_in="training.forward_backward",
        use="`decoder_input` in place of the embedding",
        parameters=(
            "self, input_ids, position_ids, attention_mask, decoder_input, labels, inference_context, "
            "packed_seq_params, extra_block_kwargs, runtime_gather_output, inference_params, loss_mask, "
            "padding_mask"
        ),
        source=("decoder_input", "extra_block_kwargs"),
    ),
    PrivateApi(
        "megatron.core.msc_utils",
        "",
        used_in="runtime.compat.checkpoint_reading",
        use="`_enabled` of MultiStorageClientFeature replaced during a load",
        source=("MultiStorageClientFeature",),
    ),
    PrivateApi(
        "megatron.core.optimizer",
        "_get_megatron_optimizer_based_on_param_groups",
        used_in="runtime.compat.fused_adam",
        use="wrapped: fused Adam",
        parameters=(
            "config, model_chunks, param_groups, per_model_buffers, model_parallel_group, "
            "data_parallel_group, data_parallel_group_gloo, data_parallel_group_idx, intra_dist_opt_group, "
            "distributed_optimizer_instance_id, pg_collection"
        ),
    ),
    PrivateApi(
        "megatron.core.optimizer.clip_grads",
        "",
        used_in="runtime.compat.grad_norm",
        use="two functions replaced in it, see test_grad_norm",
        source=("l2_norm_impl,", "multi_tensor_scale_impl, dummy_overflow_buf, [grads, grads]"),
    ),
    PrivateApi(
        "megatron.core.optimizer.clip_grads",
        "",
        used_in="runtime.compat.cpu",
        use="its `torch` replaced: factories on the CPU",
        source=("device='cuda'",),
    ),
    PrivateApi(
        "megatron.core.optimizer.cpu_offloading.hybrid_optimizer",
        "",
        used_in="runtime.compat.optimizer_offload",
        use="inner parameter of each weight",
        source=("self.param_to_inner_param",),
    ),
    PrivateApi(
        "megatron.core.optimizer.cpu_offloading.hybrid_optimizer",
        "HybridDeviceOptimizer.__init__",
        used_in="runtime.compat.optimizer_offload",
        use="inner parameter of each weight",
        source=("_init_sub_optimizers(",),
    ),
    PrivateApi(
        "megatron.core.optimizer.cpu_offloading.hybrid_optimizer",
        "HybridDeviceOptimizer._set_sub_optimizer_grads",
        used_in="runtime.compat.optimizer_offload",
        use="wrapped: gradients of fp32 weights",
        parameters="self",
        source=("decoupled_grad",),
    ),
    PrivateApi(
        "megatron.core.optimizer.distrib_optimizer",
        "DistributedOptimizer.__init__",
        used_in="runtime.compat.megatron_phase",
        use="this rank's parameter groups",
        source=("self.model_param_group_index_map", "self.is_stub_optimizer"),
    ),
    PrivateApi(
        "megatron.core.optimizer.distrib_optimizer",
        "DistributedOptimizer._get_model_param_range_map",
        used_in="runtime.compat.megatron_phase",
        use="which part of a parameter this rank holds",
        parameters="self, param",
    ),
    PrivateApi(
        "megatron.core.optimizer.grad_scaler",
        "",
        used_in="runtime.compat.cpu",
        use="its `torch` replaced: factories on the CPU",
        source=("device='cuda'",),
    ),
    PrivateApi(
        "megatron.core.optimizer.optimizer",
        "",
        used_in="runtime.compat.cpu",
        use="its `torch` replaced: factories on the CPU",
        source=("import torch",),
    ),
    PrivateApi(
        "megatron.core.optimizer.optimizer",
        "MixedPrecisionOptimizer.prepare_grads",
        used_in="optim.phase_optimizer",
        use="is_stub_optimizer set after construction",
        parameters="self",
        source=("self.is_stub_optimizer",),
    ),
    PrivateApi(
        "megatron.core.optimizer.optimizer_config",
        "OptimizerConfig.__post_init__",
        used_in="runtime.compat.optimizer_offload",
        use="is_te_min_version replaced in its module",
        parameters="self",
        source=("is_te_min_version(",),
    ),
    PrivateApi(
        "megatron.core.parallel_state",
        "get_nccl_options",
        used_in="runtime.compat.p2p",
        use="options of a group",
        parameters="pg_name, nccl_comm_cfgs",
        source=("config.max_ctas", "config.min_ctas"),
    ),
    PrivateApi(
        "megatron.core.pipeline_parallel.p2p_communication",
        "P2PCommunicator.__init__",
        used_in="runtime.compat.p2p",
        use="subclassed",
        source=("self.pp_group", "self.config"),
    ),
    PrivateApi(
        "megatron.core.pipeline_parallel.p2p_communication",
        "P2PCommunicator._communicate",
        used_in="runtime.compat.p2p",
        use="overridden to count, called for unbatched messages",
        parameters="self, tensor_send_next, tensor_send_prev, recv_prev, recv_next, tensor_shape, wait_on_reqs",
        source=("batch_p2p_comm",),
    ),
    PrivateApi(
        "megatron.core.pipeline_parallel.schedules",
        "",
        used_in="runtime.compat.cpu",
        use="its `torch` replaced: factories on the CPU",
        source=('device="cuda"',),
    ),
    PrivateApi(
        "megatron.core.pipeline_parallel.schedules",
        "backward_step",
        used_in="pipeline.executor",
        use="called once per microbatch",
        parameters="input_tensor, output_tensor, output_tensor_grad, model_type, config",
    ),
    PrivateApi(
        "megatron.core.pipeline_parallel.schedules",
        "deallocate_output_tensor",
        used_in="pipeline.executor",
        use="called after an output was sent",
        parameters="out, deallocate_pipeline_outputs",
    ),
    PrivateApi(
        "megatron.core.pipeline_parallel.schedules",
        "forward_step",
        used_in="pipeline.executor",
        use="called once per microbatch",
        parameters=(
            "forward_step_func, data_iterator, model, num_microbatches, input_tensor, forward_data_store, "
            "config, cp_group_size, collect_non_loss_data, checkpoint_activations_microbatch, "
            "is_first_microbatch, current_microbatch, vp_stage, is_last_stage"
        ),
    ),
    PrivateApi(
        "megatron.core.pipeline_parallel.schedules",
        "get_tensor_shapes",
        used_in="pipeline.executor",
        use="shape of the messages",
        parameters="seq_length, micro_batch_size, decoder_seq_length, config, tp_group, cp_group",
    ),
    PrivateApi(
        "megatron.core.tensor_parallel.cross_entropy",
        "",
        used_in="runtime.compat.cpu",
        use="its `torch` replaced: factories on the CPU",
        source=("import torch",),
    ),
    PrivateApi(
        "megatron.core.tensor_parallel.cross_entropy",
        "vocab_parallel_cross_entropy",
        used_in="runtime.compat.cpu_kernels",
        use="replaced on one tensor-parallel rank",
        parameters="vocab_parallel_logits, target, label_smoothing",
    ),
    PrivateApi(
        "megatron.core.tensor_parallel.layers",
        "",
        used_in="runtime.compat.cpu_kernels",
        use="replaced where the group has one rank",
        source=("copy_to_tensor_model_parallel_region(", "reduce_from_tensor_model_parallel_region("),
    ),
    PrivateApi(
        "megatron.core.tensor_parallel.layers",
        "linear_with_frozen_weight",
        used_in="runtime.compat.cpu_kernels",
        use="wrapped",
        parameters=(
            "input, weight, bias, gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel, "
            "tp_group, grad_output_buffer, wgrad_deferral_limit, async_grad_allreduce"
        ),
    ),
    PrivateApi(
        "megatron.core.tensor_parallel.layers",
        "linear_with_grad_accumulation_and_async_allreduce",
        used_in="runtime.compat.cpu_kernels",
        use="wrapped",
        parameters=(
            "input, weight, bias, gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel, "
            "grad_output_buffer, wgrad_deferral_limit, async_grad_allreduce, tp_group"
        ),
    ),
    PrivateApi(
        "megatron.core.tensor_parallel.random",
        "_get_cuda_rng_state",
        used_in="runtime.compat.cpu",
        use="replaced by the CPU's generator",
        parameters="device, clone, graph_safe",
    ),
    PrivateApi(
        "megatron.core.tensor_parallel.random",
        "_set_cuda_rng_state",
        used_in="runtime.compat.cpu",
        use="replaced by the CPU's generator",
        parameters="new_state, device, graph_safe",
    ),
    PrivateApi(
        "megatron.core.transformer.attention",
        "",
        used_in="runtime.compat.cpu_kernels",
        use="`apply_fused_qkv_rotary_pos_emb` replaced",
        source=("apply_fused_qkv_rotary_pos_emb(", "HAVE_FUSED_QKV_ROPE"),
    ),
    PrivateApi(
        "megatron.core.transformer.mlp",
        "",
        used_in="runtime.compat.cpu_kernels",
        use="`bias_swiglu_impl` replaced",
        source=("bias_swiglu_impl(",),
    ),
    PrivateApi(
        "megatron.core.transformer.torch_norm",
        "WrappedTorchNorm.__new__",
        used_in="runtime.compat.cpu_kernels",
        use="wrapped: RMSNorm in one function",
        parameters="cls, config, hidden_size, eps, persist_layer_norm, zero_centered_gamma, normalization",
    ),
    PrivateApi(
        "megatron.core.transformer.transformer_block",
        "TransformerBlock._checkpointed_forward",
        used_in="model.transformer_block",
        use="overridden: recomputation behind a frozen prefix",
        parameters=(
            "self, hidden_states, attention_mask, context, context_mask, rotary_pos_emb, attention_bias, "
            "packed_seq_params, use_inner_quantization_context, padding_mask"
        ),
        source=("self._get_layer(", "self.num_layers_per_pipeline_rank"),
    ),
    PrivateApi(
        "megatron.core.transformer.transformer_block",
        "TransformerBlock._get_layer",
        used_in="model.transformer_block",
        use="overridden",
        parameters="self, layer_number",
        source=("self.layers",),
    ),
    PrivateApi(
        "megatron.core.transformer.transformer_block",
        "TransformerBlock.forward",
        used_in="model.transformer_block",
        use="a stage's input",
        source=("self.input_tensor",),
    ),
    PrivateApi(
        "megatron.core.transformer.utils",
        "",
        used_in="runtime.compat.cpu",
        use="its `torch` replaced: factories on the CPU",
        source=('device="cuda"',),
    ),
    PrivateApi(
        "megatron.core.utils",
        "",
        used_in="runtime.compat.cpu",
        use="its `torch` replaced: factories on the CPU",
        source=("import torch",),
    ),
)
