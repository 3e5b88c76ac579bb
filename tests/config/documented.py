"""Keys of a ds_config that documents name, and their documented defaults."""

from __future__ import annotations

import sys
from typing import Any

ZERO: dict[str, tuple[int, Any, tuple[str, ...]]] = {
    "stage": (819, 0, ()),
    "contiguous_gradients": (825, True, ()),
    "reduce_scatter": (831, True, ()),
    "reduce_bucket_size": (837, 500_000_000, ()),
    "use_multi_rank_bucket_allreduce": (847, True, ()),
    "allgather_partitions": (853, True, ()),
    "allgather_bucket_size": (859, 500_000_000, ()),
    "overlap_comm": (869, None, ()),
    "load_from_fp32_weights": (875, True, ()),
    "elastic_checkpoint": (881, False, ()),
    "offload_param": (886, None, ()),
    "offload_optimizer": (890, None, ()),
    "sub_group_size": (894, 1_000_000_000, ()),
    "cpu_offload_param": (902, None, ()),
    "cpu_offload_use_pin_memory": (906, None, ()),
    "cpu_offload": (910, None, ()),
    "prefetch_bucket_size": (914, 50_000_000, ("stage3_prefetch_bucket_size",)),
    "param_persistence_threshold": (922, 100_000, ("stage3_param_persistence_threshold",)),
    "model_persistence_threshold": (930, sys.maxsize, ("stage3_model_persistence_threshold",)),
    "max_live_parameters": (938, 1_000_000_000, ("stage3_max_live_parameters",)),
    "max_reuse_distance": (946, 1_000_000_000, ("stage3_max_reuse_distance",)),
    "gather_16bit_weights_on_model_save": (954, False, ("stage3_gather_16bit_weights_on_model_save",)),
    "stage3_gather_fp16_weights_on_model_save": (958, False, ()),
    "ignore_unused_parameters": (962, True, ()),
    "legacy_stage1": (966, False, ()),
    "round_robin_gradients": (970, False, ()),
    "zero_hpz_partition_size": (974, 1, ()),
    "zero_quantized_weights": (982, False, ()),
    "zero_quantized_nontrainable_weights": (986, False, ()),
    "zero_quantized_gradients": (990, False, ()),
    "mics_shard_size": (994, -1, ()),
    "mics_hierarchical_params_gather": (996, False, ()),
    "memory_efficient_linear": (998, True, ()),
    "pipeline_loading_checkpoint": (1004, False, ()),
    "override_module_apply": (1005, True, ()),
}
"""zero_optimization, chapter 5.1.1 of seed 001: line, default, second names."""

OFFLOAD_PARAM: dict[str, tuple[int, Any, tuple[str, ...]]] = {
    "device": (1011, "none", ()),
    "nvme_path": (1013, None, ()),
    "buffer_count": (1015, 5, ()),
    "buffer_size": (1021, 100_000_000, ()),
    "max_in_cpu": (1027, 1_000_000_000, ()),
    "pin_memory": (1033, False, ()),
}

OFFLOAD_OPTIMIZER: dict[str, tuple[int, Any, tuple[str, ...]]] = {
    "device": (1039, "none", ()),
    "nvme_path": (1041, None, ()),
    "buffer_count": (1043, 4, ()),
    "pin_memory": (1049, False, ()),
    "pipeline_read": (1054, False, ()),
    "pipeline_write": (1058, False, ()),
    "fast_init": (1062, False, ()),
    "ratio": (1066, 1.0, ()),
}

OPTIMIZERS: dict[str, tuple[int, tuple[str, ...]]] = {
    "Adam": (
        2244,
        (
            "lr", "bias_correction", "betas", "eps", "weight_decay", "amsgrad", "adamw_mode", "adam_w_mode",
            "set_grad_none", "fp32_optimizer_states",
        ),
    ),
    "Lamb": (
        2299,
        (
            "lr", "bias_correction", "betas", "eps", "eps_inside_sqrt", "weight_decay", "max_grad_norm", "max_coeff",
            "min_coeff", "amsgrad",
        ),
    ),
    "OneBitAdam": (
        2327,
        (
            "lr", "freeze_step", "bias_correction", "betas", "eps", "eps_inside_sqrt", "weight_decay", "max_grad_norm",
            "amsgrad", "cuda_aware", "comm_backend_name",
        ),
    ),
    "ZeroOneAdam": (
        2354,
        (
            "lr", "bias_correction", "betas", "eps", "eps_inside_sqrt", "weight_decay", "max_grad_norm",
            "var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper", "amsgrad", "cuda_aware",
            "comm_backend_name",
        ),
    ),
    "OneBitLamb": (
        2388,
        (
            "lr", "freeze_step", "bias_correction", "betas", "eps", "eps_inside_sqrt", "weight_decay", "max_grad_norm",
            "max_coeff", "min_coeff", "amsgrad", "cuda_aware", "comm_backend_name", "coeff_beta", "factor_max",
            "factor_min", "factor_threshold",
        ),
    ),
}  # fmt: skip
"""Arguments of optimizers, chapter 9 of seed 001: line, names."""

SCHEDULES: dict[str, tuple[int, tuple[str, ...]]] = {
    "LRRangeTest": (
        2433,
        (
            "lr_range_test_min_lr", "lr_range_test_step_size", "lr_range_test_step_rate", "lr_range_test_staircase",
            "last_batch_iteration",
        ),
    ),
    "OneCycle": (
        2469,
        (
            "cycle_min_lr", "cycle_max_lr", "decay_lr_rate", "cycle_first_step_size", "cycle_second_step_size",
            "cycle_first_stair_count", "cycle_second_stair_count", "decay_step_size", "cycle_momentum", "cycle_min_mom",
            "cycle_max_mom", "decay_mom_rate", "last_batch_iteration",
        ),
    ),
    "WarmupLR": (
        2522, ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "last_batch_iteration")
    ),
    "WarmupDecayLR": (
        2555,
        (
            "total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type",
            "last_batch_iteration",
        ),
    ),
    "WarmupCosineLR": (
        2591,
        (
            "total_num_steps", "warmup_min_ratio", "warmup_num_steps", "cos_min_ratio", "warmup_type",
            "last_batch_iteration",
        ),
    ),
}  # fmt: skip
"""Arguments of schedules, chapter 10 of seed 001: line, names."""

OTHERS: dict[str, str] = {
    # Seed 001, chapter 1.1.2 and 8.1.2: what initialize and the batch setter speak of.
    "train_batch_size": "1939", "train_micro_batch_size_per_gpu": "1943", "gradient_accumulation_steps": "427",
    "optimizer.type": "1088", "optimizer.params": "1089", "scheduler.type": "2425", "scheduler.params": "2425",
    "fp16.enabled": "1085", "zero_optimization.stage": "1082", "comms_logger": "144",
    # Chapter 4.2: activation checkpointing, by its names in a document.
    "activation_checkpointing.partition_activations": "698",
    "activation_checkpointing.contiguous_memory_optimization": "699",
    "activation_checkpointing.number_checkpoints": "700",
    "activation_checkpointing.cpu_checkpointing": "701",
    "activation_checkpointing.synchronize_checkpoint_boundary": "702",
    "activation_checkpointing.profile": "703",
    # Chapters 11 and 12: the sections of later parts.
    "flops_profiler.enabled": "2629", "autotuning.enabled": "2817",
    # Chapter 14: monitors.
    "tensorboard.enabled": "3183", "tensorboard.output_path": "3187", "tensorboard.job_name": "3191",
    "wandb.enabled": "3201", "wandb.group": "3205", "wandb.team": "3209", "wandb.project": "3213",
    "csv_monitor.enabled": "3225", "csv_monitor.output_path": "3229", "csv_monitor.job_name": "3233",
    # What Hugging Face's integration writes, and the documents that its users keep.
    "wall_clock_breakdown": "hf", "zero_allow_untested_optimizer": "hf", "zero_force_ds_cpu_optimizer": "hf",
    "fp16.auto_cast": "hf", "fp16.loss_scale": "hf", "fp16.loss_scale_window": "hf", "fp16.initial_scale_power": "hf",
    "fp16.hysteresis": "hf", "fp16.min_loss_scale": "hf", "bf16.enabled": "hf", "data_types.grad_accum_dtype": "hf",
    "amp.enabled": "hf", "amp.opt_level": "hf", "dump_state": "hf", "sparse_gradients": "hf", "steps_per_print": "hf",
    "gradient_clipping": "hf", "prescale_gradients": "hf", "communication_data_type": "hf", "tensor_parallel": "hf",
    "sequence_parallel_size": "hf", "checkpoint.load_universal": "hf", "torch_autocast.enabled": "hf",
    # The configuration page.
    "gradient_predivide_factor": "page", "seq_parallel_communication_data_type": "page", "memory_breakdown": "page",
    "fp16.consecutive_hysteresis": "page", "fp16.fp16_master_weights_and_grads": "page",
    "bf16.bf16_master_weights_and_grads": "page", "bf16.bf16_optimizer_states": "page",
    "torch_autocast.dtype": "page", "torch_autocast.lower_precision_safe_modules": "page",
    "aio.block_size": "page", "aio.queue_depth": "page", "aio.thread_count": "page", "aio.single_submit": "page",
    "aio.overlap_events": "page", "comms_logger.verbose": "page", "comms_logger.prof_all": "page",
    "comms_logger.debug": "page", "comms_logger.prof_ops": "page", "checkpoint.tag_validation": "page",
    "checkpoint.use_node_local_storage": "page", "checkpoint.parallel_write.pipeline_stage": "page",
    "flops_profiler.profile_step": "page", "flops_profiler.module_depth": "page", "flops_profiler.top_modules": "page",
    "flops_profiler.detailed": "page", "flops_profiler.output_file": "page",
    "curriculum_learning.enabled": "page", "data_efficiency.enabled": "page", "progressive_layer_drop.enabled": "page",
    "comet.enabled": "page", "sparse_attention.mode": "page", "hybrid_engine.enabled": "page",
    "compile.deepcompile": "page", "eigenvalue.enabled": "page",
    "expert_parallel.enabled": "page", "pipeline.stages": "page", "nebula.enabled": "page", "timers": "page",
    "graph_harvesting": "page", "use_data_before_expert_parallelism": "page", "disable_allgather": "page",
    "dataloader_drop_last": "page", "gradient_allreduce_op": "page", "disable_python_gc": "page",
    "bf16.immediate_grad_update": "page", "bf16.check_grad_overflow": "page", "quantize_training.enabled": "page",
    "quantize_training.quantize_verbose": "page", "quantize_training.quantizer_kernel": "page",
    "quantize_training.quantize_type": "page", "quantize_training.quantize_groups": "page",
    "quantize_training.quantize_bits.start_bits": "page", "quantize_training.quantize_bits.target_bits": "page",
    "quantize_training.quantize_schedule.quantize_period": "page",
    "quantize_training.quantize_schedule.schedule_offset": "page", "quantize_training.quantize_algo.q_type": "page",
    "quantize_training.quantize_algo.rounding": "page", "quantize_training.fp16_mixed_quantize.enabled": "page",
    "quantize_training.fp16_mixed_quantize.quantize_change_ratio": "page",
    "quantize_training.eigenvalue.enabled": "page", "quantize_training.eigenvalue.verbose": "page",
    "quantize_training.eigenvalue.max_iter": "page", "quantize_training.eigenvalue.tol": "page",
    "quantize_training.eigenvalue.stability": "page", "quantize_training.eigenvalue.gas_boundary_resolution": "page",
    "quantize_training.eigenvalue.layer_name": "page", "quantize_training.eigenvalue.layer_num": "page",
    "compression_training.weight_quantization.shared_parameters.enabled": "page",
    "compression_training.weight_quantization.shared_parameters.quantizer_kernel": "page",
    "compression_training.weight_quantization.shared_parameters.schedule_offset": "page",
    "compression_training.weight_quantization.shared_parameters.quantize_groups": "page",
    "compression_training.weight_quantization.shared_parameters.quantize_verbose": "page",
    "compression_training.weight_quantization.shared_parameters.quantization_type": "page",
    "compression_training.weight_quantization.shared_parameters.rounding": "page",
    "compression_training.weight_quantization.shared_parameters.quantize_weight_in_forward": "page",
    "compression_training.weight_quantization.shared_parameters.fp16_mixed_quantize.enabled": "page",
    "compression_training.weight_quantization.shared_parameters.fp16_mixed_quantize.quantize_change_ratio": "page",
    "compression_training.activation_quantization.shared_parameters.enabled": "page",
    "compression_training.activation_quantization.shared_parameters.quantization_type": "page",
    "compression_training.activation_quantization.shared_parameters.range_calibration": "page",
    "compression_training.activation_quantization.shared_parameters.schedule_offset": "page",
    "compression_training.sparse_pruning.shared_parameters.enabled": "page",
    "compression_training.sparse_pruning.shared_parameters.method": "page",
    "compression_training.sparse_pruning.shared_parameters.schedule_offset": "page",
    "compression_training.sparse_pruning.shared_parameters.schedule_offset_end": "page",
    "compression_training.sparse_pruning.shared_parameters.schedule_offset_stride": "page",
    "compression_training.sparse_pruning.shared_parameters.block_pattern": "page",
    "compression_training.sparse_pruning.shared_parameters.dense_ratio": "page",
    "compression_training.sparse_pruning.shared_parameters.excluded_modules": "page",
    "compression_training.row_pruning.shared_parameters.enabled": "page",
    "compression_training.row_pruning.shared_parameters.method": "page",
    "compression_training.row_pruning.shared_parameters.schedule_offset": "page",
    "compression_training.head_pruning.shared_parameters.enabled": "page",
    "compression_training.head_pruning.shared_parameters.method": "page",
    "compression_training.head_pruning.shared_parameters.schedule_offset": "page",
    "compression_training.head_pruning.shared_parameters.num_heads": "page",
    "compression_training.channel_pruning.shared_parameters.enabled": "page",
    "compression_training.channel_pruning.shared_parameters.method": "page",
    "compression_training.channel_pruning.shared_parameters.schedule_offset": "page",
    "compression_training.layer_reduction.enabled": "page",
    "compression_training.layer_reduction.keep_number_layer": "page",
    "compression_training.layer_reduction.module_name_prefix": "page",
    "compression_training.layer_reduction.teacher_layer": "page",
    "compression_training.layer_reduction.other_module_name": "page",
    "tensor_parallel.autotp_size": "page", "tensor_parallel.partition_config": "page",
    "tensor_parallel.preset_model": "page", "tensor_parallel.injection_policy_tuple": "page",
    "tensor_parallel.tp_overlap_comm": "page", "tensor_parallel.tp.tp_size": "page",
    "tensor_parallel.tp.tp_grain_size": "page", "tensor_parallel.dtype": "page",
    "tensor_parallel.vocab_parallel_lm_head": "page", "tensor_parallel.keep_module_on_host": "page",
    "zero_optimization.leaf_module": "page", "aio.use_gds": "page",
}  # fmt: skip
"""Every other key: line of seed 001, or where else it is from."""

EFFECTS: dict[str, str] = {
    "compile.deepcompile": "tests/compile/test_engine.py::test_deepcompile_of_the_facade",
    "activation_checkpointing":
        "tests/activation_checkpointing/test_engine.py::test_every_key_of_the_section_does_what_it_says",
    "autotuning": "tests/tuning/test_tune.py::test_every_key_of_the_section_does_what_it_says",
    **{
        f"elasticity{key}": "tests/engine/test_elastic.py::test_sizes_follow_from_the_section"
        for key in ("", ".max_train_batch_size", ".micro_batch_sizes", ".prefer_larger_batch",
                    ".ignore_non_elastic_batch_info")
    },
    "elasticity.enabled": "tests/engine/test_elastic.py::test_any_number_of_ranks_gives_one_curve",
    "elasticity.min_gpus": "tests/engine/test_elastic.py::test_sizes_that_cannot_be",
    "elasticity.max_gpus": "tests/engine/test_elastic.py::test_sizes_that_cannot_be",
    "elasticity.resume_from": "tests/engine/test_elastic.py::test_a_job_goes_on_with_another_number_of_ranks",
    "flops_profiler": "tests/profiling/test_engine.py::test_every_key_of_the_section_does_what_it_says",
    "pipeline.stages": "tests/pipe/test_faults.py::test_a_configuration_for_other_stages_is_refused",
    "tensor_parallel": "tests/tensor/test_engine.py::test_every_key_of_the_section_does_what_it_says",
    "tensor_parallel.tp": "tests/tensor/test_engine.py::test_every_key_of_the_section_does_what_it_says",
    **{
        f"tensor_parallel.{key}": "tests/tensor/test_engine.py::test_deepspeeds_ways_to_say_how_a_model_is_cut"
        for key in ("partition_config", "preset_model", "injection_policy_tuple")
    },
    "tensor_parallel.tp_overlap_comm":
        "tests/tensor/test_splitting.py::test_sums_in_pieces_are_the_sums_and_begin_while_the_rest_is_computed",
    "tensorboard": "tests/monitor/test_battery.py::test_its_reader_finds_what_was_written",
    "wandb": "tests/monitor/test_battery.py::test_its_reader_finds_what_was_written",
    "csv_monitor": "tests/monitor/test_battery.py::test_its_reader_finds_what_was_written",
    "comet": "tests/monitor/test_sinks.py::test_comet_gets_what_the_section_says_and_values_at_intervals",
    "jsonl_monitor": "tests/monitor/test_battery.py::test_its_reader_finds_what_was_written",
    "curriculum_learning.enabled":
        "tests/data_efficiency/test_curriculum.py::test_the_model_sees_the_lengths_of_the_schedule",
    "progressive_layer_drop.enabled":
        "tests/data_efficiency/test_layer_drop.py::test_the_blocks_that_run_are_those_that_were_drawn",
    "data_efficiency.enabled":
        "tests/data_efficiency/test_random_ltd.py::test_each_block_sees_the_tokens_of_the_schedule",
    **{
        f"quantize_training{key}":
            "tests/compression/test_moq.py::test_without_curvature_it_is_weight_quantization_with_one_group"
        for key in ("", ".quantize_bits", ".quantize_schedule", ".quantize_algo", ".fp16_mixed_quantize")
    },
    "quantize_training.eigenvalue":
        "tests/compression/test_moq.py::test_every_stage_measures_the_same_bits_and_what_one_process_measures",
    "quantize_training.eigenvalue.verbose": "tests/compression/test_moq.py::test_in_a_loop_of_ones_own",
    "quantize_training.eigenvalue.max_iter":
        "tests/compression/test_moq.py::test_iterations_end_when_they_are_told_to",
    "quantize_training.eigenvalue.tol": "tests/compression/test_moq.py::test_iterations_end_when_they_are_told_to",
    "quantize_training.eigenvalue.gas_boundary_resolution":
        "tests/compression/test_moq.py::test_curvature_is_looked_at_in_every_nth_step_only",
    "eigenvalue.enabled": "tests/compression/test_moq.py::test_other_spellings_mean_the_same",
    "compression_training.weight_quantization.shared_parameters":
        "tests/compression/test_weight_quantization.py::test_forward_sees_the_quantised_weight",
    "compression_training.weight_quantization.shared_parameters.schedule_offset":
        "tests/compression/test_weight_quantization.py::test_bits_follow_the_schedule",
    "compression_training.weight_quantization.shared_parameters.quantize_verbose":
        "tests/compression/test_weight_quantization.py::test_verbose_says_when_bits_change",
    "compression_training.weight_quantization.shared_parameters.quantize_weight_in_forward":
        "tests/compression/test_engine.py::test_sixteen_bits_are_rounded_and_masters_are_not",
    "compression_training.weight_quantization.shared_parameters.fp16_mixed_quantize":
        "tests/compression/test_weight_quantization.py::test_mixing_grows_and_begins_anew_when_bits_fall",
    "compression_training.activation_quantization.shared_parameters":
        "tests/compression/test_activation_quantization.py::test_dynamic_ranges_are_those_of_tokens_and_of_images",
    "compression_training.activation_quantization.shared_parameters.range_calibration":
        "tests/compression/test_activation_quantization.py::test_a_static_range_follows_what_training_has_seen",
    "compression_training.activation_quantization.shared_parameters.schedule_offset":
        "tests/compression/test_activation_quantization.py::test_before_the_offset_nothing_happens",
    "compression_training.sparse_pruning.shared_parameters":
        "tests/compression/test_sparse_pruning.py::test_l1_keeps_the_largest_of_each_weight",
    "compression_training.sparse_pruning.shared_parameters.method":
        "tests/compression/test_sparse_pruning.py::test_learned_scores_begin_as_magnitudes_get_the_gradient_of_the_mask_and_move_it",
    "compression_training.sparse_pruning.shared_parameters.schedule_offset":
        "tests/compression/test_sparse_pruning.py::test_the_mask_is_made_at_the_offset_and_stays_while_weights_move",
    "compression_training.sparse_pruning.shared_parameters.schedule_offset_end":
        "tests/compression/test_sparse_pruning.py::test_snip_momentum_is_what_it_says_over_all_weights",
    "compression_training.sparse_pruning.shared_parameters.schedule_offset_stride":
        "tests/compression/test_sparse_pruning.py::test_snip_momentum_is_what_it_says_over_all_weights",
    "compression_training.sparse_pruning.shared_parameters.dense_ratio":
        "tests/compression/test_sparse_pruning.py::test_snip_momentum_is_what_it_says_over_all_weights",
    "compression_training.sparse_pruning.shared_parameters.block_pattern":
        "tests/compression/test_sparse_pruning.py::test_blocks_and_two_of_four",
    "compression_training.sparse_pruning.shared_parameters.excluded_modules":
        "tests/compression/test_sparse_pruning.py::test_snip_momentum_with_two_of_four_goes_one_after_the_other",
    "compression_training.row_pruning.shared_parameters":
        "tests/compression/test_unit_pruning.py::test_rows_go_and_what_they_gave_is_in_the_next_bias",
    "compression_training.row_pruning.shared_parameters.method":
        "tests/compression/test_unit_pruning.py::test_learned_rows_get_the_gradient_of_their_mask",
    "compression_training.head_pruning.shared_parameters":
        "tests/compression/test_head_pruning.py::test_heads_go_from_queries_keys_values_and_output",
    "compression_training.head_pruning.shared_parameters.method":
        "tests/compression/test_head_pruning.py::test_heads_of_the_largest_norm_stay",
    "compression_training.channel_pruning.shared_parameters":
        "tests/compression/test_unit_pruning.py::test_channels_go_with_their_norm_and_the_next_layer",
    "compression_training.layer_reduction":
        "tests/compression/test_layer_reduction.py::test_layers_and_other_modules_begin_as_the_teachers",
    "train_batch_size": "tests/engine/test_steps.py::test_another_batch_size",
    "train_micro_batch_size_per_gpu": "tests/engine/test_loader.py::test_an_epoch_is_dealt_out_once",
    "gradient_accumulation_steps":
        "tests/engine/test_engine.py::test_ranks_and_accumulation_change_nothing_but_rounding",
    "optimizer.type": "tests/engine/test_engine.py::test_one_rank_is_plain_torch",
    "optimizer.params": "tests/optim/test_by_name.py",
    "scheduler.type": "tests/engine/test_engine.py::test_the_schedule_is_stepped_at_boundaries",
    "scheduler.params": "tests/lr_schedules/test_schedules.py",
    "fp16.enabled": "tests/engine/test_engine.py::test_an_overflow_skips_the_step_and_the_schedule",
    "fp16.auto_cast": "tests/engine/test_steps.py::test_inputs_keep_their_dtype",
    "fp16.loss_scale": "tests/zero/test_optimizer.py::test_a_static_scale_changes_nothing_but_rounding",
    "fp16.loss_scale_window": "tests/zero/test_optimizer.py::test_the_loss_scaler_follows_its_definition",
    "fp16.initial_scale_power": "tests/engine/test_engine.py::test_an_overflow_skips_the_step_and_the_schedule",
    "fp16.hysteresis": "tests/zero/test_optimizer.py::test_the_loss_scaler_follows_its_definition",
    "fp16.consecutive_hysteresis": "tests/zero/test_optimizer.py::test_the_loss_scaler_follows_its_definition",
    "fp16.min_loss_scale": "tests/zero/test_optimizer.py::test_the_loss_scaler_follows_its_definition",
    "bf16.enabled": "tests/engine/test_engine.py::test_bfloat16_learns",
    "bf16.check_grad_overflow":
        "tests/deepspeed/test_engine_gradients.py::test_bf16_says_whether_gradients_that_are_not_finite_are_used",
    "pipeline.activation_checkpoint_interval":
        "tests/pipe/test_engine.py::test_the_section_says_which_activations_are_computed_again",
    "pipeline.use_reentrant": "tests/pipe/test_engine.py::test_the_section_says_which_activations_are_computed_again",
    "torch_autocast.enabled": "tests/engine/test_steps.py::test_torch_autocast",
    "torch_autocast.dtype": "tests/engine/test_steps.py::test_torch_autocast",
    "data_types.grad_accum_dtype": "tests/engine/test_steps.py::test_the_type_in_which_micro_batches_are_added_up",
    "sparse_gradients": "tests/engine/test_steps.py::test_embeddings_travel_as_rows",
    "wall_clock_breakdown": "tests/engine/test_parts.py",
    "steps_per_print": "tests/cli/test_cli.py",
    "gradient_clipping": "tests/zero/update/test_clipping.py::test_it_clips_as_torch_does_in_one_process",
    "prescale_gradients": "tests/engine/test_steps.py::test_how_gradients_travel_changes_nothing_but_rounding",
    "gradient_predivide_factor": "tests/engine/test_steps.py::test_how_gradients_travel_changes_nothing_but_rounding",
    "communication_data_type": "tests/engine/test_steps.py::test_how_gradients_travel_changes_nothing_but_rounding",
    "aio.block_size": "tests/io/test_handle.py",
    "aio.queue_depth": "tests/io/test_handle.py",
    "aio.thread_count": "tests/io/test_bench.py::test_the_section_of_a_configuration",
    "aio.single_submit": "tests/io/test_handle.py",
    "aio.overlap_events": "tests/io/test_bench.py::test_the_section_of_a_configuration",
    "aio.use_gds": "tests/io/test_gds.py::test_shards_and_saved_activations_take_the_way_that_the_configuration_names",
    "zero_optimization.stage": "tests/laws/test_placements.py",
    "zero_optimization.reduce_bucket_size": "tests/laws/test_axes.py",
    "zero_optimization.allgather_bucket_size": "tests/zero/options/test_options.py",
    "zero_optimization.overlap_comm": "tests/laws/test_placements.py",
    "zero_optimization.sub_group_size": "tests/laws/test_placements.py",
    "zero_optimization.prefetch_bucket_size": "tests/laws/test_forecast.py",
    "zero_optimization.param_persistence_threshold": "tests/laws/test_placements.py",
    "zero_optimization.model_persistence_threshold": "tests/zero/options/test_options.py",
    "zero_optimization.max_live_parameters": "tests/laws/test_forecast.py",
    "zero_optimization.gather_16bit_weights_on_model_save":
        "tests/engine/test_saving.py::test_without_the_option_nothing_is_saved_at_stage_3_and_the_log_says_why",
    "zero_optimization.load_from_fp32_weights":
        "tests/engine/test_state_dicts.py::test_masters_of_16_bit_weights_are_these_weights",
    "checkpoint.load_universal": "tests/engine/test_foreign.py::test_which_of_a_folder_is_loaded",
    "zero_optimization.ignore_unused_parameters":
        "tests/zero/test_optimizer.py::test_unused_parameters_are_an_error_where_that_is_asked_for",
    "zero_optimization.zero_hpz_partition_size": "tests/laws/test_axes.py",
    "zero_optimization.zero_quantized_weights": "tests/laws/test_axes.py",
    "zero_optimization.zero_quantized_nontrainable_weights": "tests/laws/test_axes.py",
    "zero_optimization.zero_quantized_gradients": "tests/laws/test_axes.py",
    "zero_optimization.mics_shard_size": "tests/laws/test_axes.py",
    "zero_optimization.mics_hierarchical_params_gather": "tests/laws/test_axes.py",
    "zero_optimization.override_module_apply": "tests/shard/init/test_init.py",
    "zero_optimization.offload_param.device": "tests/shard/offload/test_offload.py",
    "zero_optimization.offload_param.nvme_path": "tests/shard/offload/test_offload.py",
    "zero_optimization.offload_param.max_in_cpu": "tests/shard/offload/test_offload.py",
    "zero_optimization.offload_param.pin_memory": "tests/gpu/test_zero_offload.py",
    "zero_optimization.offload_optimizer.device": "tests/shard/offload/test_offload.py",
    "zero_optimization.offload_optimizer.nvme_path": "tests/shard/offload/test_offload.py",
    "zero_optimization.offload_optimizer.pin_memory": "tests/gpu/test_zero_offload.py",
    "zero_optimization.offload_optimizer.pipeline_read": "tests/shard/offload/test_offload.py",
    "zero_optimization.offload_optimizer.pipeline_write": "tests/shard/offload/test_offload.py",
    "zero_optimization.offload_optimizer.ratio": "tests/shard/offload/test_offload.py",
}  # fmt: skip
"""Of each documented key that is carried out: the test that shows what it does (a function, or a file with several)."""
