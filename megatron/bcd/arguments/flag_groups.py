"""Titles of the groups in ``--help``, in their order."""

BCD = "block coordinate descent"
NETWORK = "network size"
TRAINING = "training"
BATCH = "batch size"
LEARNING_RATE = "learning rate"
OPTIMIZER = "optimizer"
PRECISION = "precision"
PARALLELISM = "parallelism"
RECOMPUTATION = "recomputation of activations"
DATA = "data"
FINE_TUNING = "supervised fine-tuning"
TOKENIZER = "tokenizer"
CHECKPOINTS = "checkpoints"
REPORT = "report"
GROUPS = (
    BCD,
    NETWORK,
    TRAINING,
    BATCH,
    LEARNING_RATE,
    OPTIMIZER,
    PRECISION,
    PARALLELISM,
    RECOMPUTATION,
    DATA,
    FINE_TUNING,
    TOKENIZER,
    CHECKPOINTS,
    REPORT,
)

FIELD_GROUPS = {
    "micro_batch_size": BATCH,
    "global_batch_size": BATCH,
    "rampup_batch_size": BATCH,
    "distributed_backend": PARALLELISM,
    "distributed_timeout_minutes": PARALLELISM,
    "use_distributed_optimizer": PARALLELISM,
    "log_progress": REPORT,
    "decoder_first_pipeline_num_layers": PARALLELISM,
    "decoder_last_pipeline_num_layers": PARALLELISM,
    "account_for_embedding_in_pipeline_split": PARALLELISM,
    "account_for_loss_in_pipeline_split": PARALLELISM,
    "pipeline_model_parallel_layout": PARALLELISM,
    "pipeline_cut": PARALLELISM,
    "recompute": RECOMPUTATION,
    "recompute_memory_gib": RECOMPUTATION,
    "muon_momentum_dtype": OPTIMIZER,
    "muon_grad_dtype": OPTIMIZER,
    "start_weight_decay": OPTIMIZER,
    "end_weight_decay": OPTIMIZER,
    "weight_decay_incr_style": OPTIMIZER,
    "adam_moments_dtype": OPTIMIZER,
    "main_grads_dtype": OPTIMIZER,
    "exp_avg_dtype": OPTIMIZER,
    "exp_avg_sq_dtype": OPTIMIZER,
    "num_epochs": FINE_TUNING,
    "sft": FINE_TUNING,
    "sft_prompt_format": FINE_TUNING,
    "sft_packing": FINE_TUNING,
    "sft_drop_long": FINE_TUNING,
}
"""Fields that belong to another group than the rest of their dataclass."""

METAVARS = {
    "data_path": "PREFIX",
    "train_data_path": "PREFIX",
    "valid_data_path": "PREFIX",
    "test_data_path": "PREFIX",
    "vocab_file": "FILE",
    "merge_file": "FILE",
    "metrics_file": "FILE",
    "tokenizer_model": "PATH",
    "save": "FOLDER",
    "load": "FOLDER",
    "data_cache_path": "FOLDER",
    "tensorboard_dir": "FOLDER",
    "wandb_save_dir": "FOLDER",
    "wandb_project": "NAME",
    "wandb_entity": "NAME",
    "wandb_exp_name": "NAME",
    "tokenizer_type": "TYPE",
    "recompute_modules": "MODULE",
}
"""Placeholders in --help, by field."""
