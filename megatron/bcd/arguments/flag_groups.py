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
TOKENIZER = "tokenizer"
CHECKPOINTS = "checkpoints"
REPORT = "report"
COMPATIBILITY = "accepted for compatibility"
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
    TOKENIZER,
    CHECKPOINTS,
    REPORT,
    COMPATIBILITY,
)

DESCRIPTIONS = {
    COMPATIBILITY: "Flags of Megatron-LM for what is done here anyway.",
}

FIELD_GROUPS = {
    "micro_batch_size": BATCH,
    "global_batch_size": BATCH,
    "rampup_batch_size": BATCH,
    "distributed_backend": PARALLELISM,
    "distributed_timeout_minutes": PARALLELISM,
    "use_distributed_optimizer": PARALLELISM,
    "muon_momentum_dtype": OPTIMIZER,
    "muon_grad_dtype": OPTIMIZER,
    "start_weight_decay": OPTIMIZER,
    "end_weight_decay": OPTIMIZER,
    "weight_decay_incr_style": OPTIMIZER,
    "adam_moments_dtype": OPTIMIZER,
}
"""Fields that belong to another group than the rest of their dataclass."""
