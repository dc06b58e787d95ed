"""Which matrices a run steps without Megatron Core's optimizer, and by which rules (--bcd-resting-update, --optimizer
muon)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from megatron.bcd.config import RunConfig
from megatron.bcd.optim.matrix_direction import layout_of
from megatron.bcd.optim.matrix_optimizer import DTYPES, MatrixOptimizer, MatrixRule
from megatron.bcd.optim.owned_parameters import OwnedParameters
from megatron.bcd.runtime import replicas

Rules = list[tuple[MatrixRule, Iterable[str], bool]]
"""Rule, names of matrices, and whether the active block owns them."""


def build_matrix_optimizer(
    config: RunConfig, model: torch.nn.Module, parameters: OwnedParameters
) -> MatrixOptimizer | None:
    """For the matrices of this stage; None if Megatron Core's optimizer steps all that is updated."""
    if not (is_muon(config) or config.bcd.bcd_resting_update != "none"):
        return None
    built = get_model_config(model)
    heads, groups, width = built.num_attention_heads, built.num_query_groups, built.kv_channels
    assert groups is not None and width is not None
    qkv_parts = (heads // groups * width, width, width)
    tensor_group = parallel_state.get_tensor_model_parallel_group()
    return MatrixOptimizer(
        {
            name: (
                parameter,
                layout_of(
                    name,
                    parameter,
                    qkv_parts=qkv_parts if config.optimizer.muon_split_qkv else None,
                    group=tensor_group,
                    tp_mode=config.optimizer.muon_tp_mode,
                ),
            )
            for name, parameter in parameters.matrices().items()
        },
        group=replicas.group(),
        keeps_low_bits_on_host=config.bcd.bcd_resting_update == "none",
        momentum_dtype=DTYPES[config.bcd.muon_momentum_dtype],
        overlaps_reduction=config.ddp.overlap_grad_reduce,
    )


def is_muon(config: RunConfig) -> bool:
    """Whether Muon steps the active block's matrices."""
    return config.optimizer.optimizer == "muon"


def rules_of_phase(config: RunConfig, parameters: OwnedParameters, block: int) -> Rules:
    """What the matrix optimizer steps in a phase of `block`."""
    rules: Rules = [(_resting_rule(config), parameters.resting(block), False)]
    if is_muon(config):
        of_block, matrices = parameters.of_block(block), parameters.matrices()
        rules.append((_muon_rule(config), [name for name in of_block if name in matrices], True))
    return rules


def _resting_rule(config: RunConfig) -> MatrixRule:
    return MatrixRule(
        name=config.bcd.bcd_resting_update,
        scale=config.bcd.bcd_resting_lr_ratio,
        grad_dtype=DTYPES[config.bcd.bcd_resting_grad_dtype],
        num_steps=config.optimizer.muon_num_ns_steps,
    )


def _muon_rule(config: RunConfig) -> MatrixRule:
    optimizer = config.optimizer
    return MatrixRule(
        name="orthogonal",
        scale=optimizer.muon_extra_scale_factor,
        grad_dtype=DTYPES[config.bcd.muon_grad_dtype],
        momentum=optimizer.muon_momentum,
        nesterov=optimizer.muon_use_nesterov,
        num_steps=optimizer.muon_num_ns_steps,
        scale_mode=optimizer.muon_scale_mode,
    )
