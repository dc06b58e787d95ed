"""Supervised fine-tuning trains on the answers under every layout, like a plain loop over transformers' model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from megatron.core.num_microbatches_calculator import get_num_microbatches
from support import fine_tuning, huggingface_weights, resumed_runs, texts, worlds
from support.dist import World

from megatron.bcd.config import RunConfig
from megatron.bcd.data import attention_inputs
from megatron.bcd.model.builder import unwrap_model

LLAMA: dict[str, Any] = {"swiglu": True, "ffn_hidden_size": 48, "normalization": "RMSNorm", "disable_bias_linear": True}
LLAMA |= {"position_embedding_type": "rope", "untie_embeddings_and_output_weights": True, "num_layers": 3}
PLAIN = {"bcd_num_blocks": 1, "lr": 1e-3, "lr_decay_style": "constant", "weight_decay": 0.0, "split": "100,0,0"}


@pytest.fixture(scope="module")
def records() -> list[dict[str, str]]:
    return fine_tuning.questions(60)


@pytest.fixture(scope="module")
def data(records: list[dict[str, str]], tmp_path_factory: pytest.TempPathFactory) -> str:
    return fine_tuning.write_records(tmp_path_factory.mktemp("records") / "data.jsonl", records)


def run_of(config: RunConfig) -> dict[str, Any]:
    """Return a whole run, its initial weights, and the samples of its steps."""
    with worlds.started(config) as run:
        batches: Iterator[Any] = worlds.first_batches(run)
        steps = range(run.train_iters)
        samples = [
            [sample for _ in range(get_num_microbatches()) for sample in fine_tuning.samples_of(next(batches))]
            for _ in steps
        ]
        before = worlds.weights_of(run.model)
        run.train()
        return worlds.outcome(run) | {"before": before, "samples": samples, "notes": run.recorder.notes}


def plain_loop(config: RunConfig, result: dict[str, Any], records: list[dict[str, str]]) -> list[float]:
    """Return the losses of a loop over transformers' LLaMA, one padded row per sample; answers come from `records`."""
    heads = config.transformer["num_attention_heads"]
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=worlds.PADDED_VOCABULARY,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=heads,
            intermediate_size=config.transformer["ffn_hidden_size"],
            rms_norm_eps=1e-5,
            tie_word_embeddings=False,
        )
    )
    model.load_state_dict(huggingface_weights.to_llama(result["before"], num_heads=heads, num_groups=heads))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    answers = {record["prompt"] + record["completion"]: record["completion"] for record in records}
    losses = []
    for samples in result["samples"]:
        width = max(len(sample["ids"]) for sample in samples)
        ids = torch.tensor([sample["ids"] + [0] * (width - len(sample["ids"])) for sample in samples])
        labels = torch.full_like(ids, -100)
        for row, sample in enumerate(samples):
            num_learned, end = len(answers[fine_tuning.text_of(sample["ids"])]) + 1, len(sample["ids"])
            labels[row, end - num_learned : end] = ids[row, end - num_learned : end]
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_one_block_is_a_plain_loop(world1: World, data: str, records: list[dict[str, str]]) -> None:
    """Fine-tuning with one block has the losses of a plain loop over padded, unpacked samples."""
    config = fine_tuning.config_of(data, **LLAMA, **PLAIN, train_iters=10)
    (result,) = world1.run(run_of, config)
    expected = plain_loop(config, result, records)
    assert len(expected) == 10 and expected[-1] < expected[0] - 0.5
    assert result["losses"] == pytest.approx(expected, abs=1e-4)


def packed_and_alone(config: RunConfig, *, by_text: bool) -> list[tuple[str, float]]:
    """Return the largest differences between each sample in a packed microbatch and the same sample alone.

    They concern its token losses, the gradients of their sum (relative to the largest one above 1), and the largest
    gradient of a masked position's logits.
    """
    with texts.attention_of_texts(by_text=by_text), worlds.started(config) as run:
        batch = next(worlds.first_batches(run))
        model = unwrap_model(run.model)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        logits: list[torch.Tensor] = []
        model.output_layer.register_forward_hook(lambda module, inputs, output: logits.append(output[0]))

        def together() -> torch.Tensor:  # each time anew: backward passes overwrite what the forward pass kept
            inputs = attention_inputs(batch)
            assert (inputs["attention_mask"] is None) == (inputs["packed_seq_params"] is not None) == by_text
            return model(batch["tokens"], batch["position_ids"], labels=batch["labels"], **inputs)

        def gradients_of(losses: torch.Tensor) -> list[torch.Tensor]:
            run.active.zero_grad()
            losses.sum().backward()
            assert run.active.wrapped is not None
            run.active.wrapped.finish_grad_sync()
            return [parameter.main_grad.clone() for parameter in parameters]

        (of_logits,) = torch.autograd.grad((together() * batch["loss_mask"]).sum(), logits)
        is_masked = batch["loss_mask"].t() == 0
        results = [("masked", of_logits[is_masked].abs().max().item())]
        assert of_logits[~is_masked].abs().amax(dim=-1).min() > 0
        for row in range(len(batch["tokens"])):
            starts = [*torch.nonzero(batch["position_ids"][row] == 0).flatten().tolist(), fine_tuning.SEQUENCE]
            assert len(starts) > 2, "nothing is packed"
            for start, end in zip(starts, starts[1:], strict=False):
                part = (slice(row, row + 1), slice(start, end))
                positions = torch.arange(end - start, device=batch["tokens"].device)[None]
                alone = model(batch["tokens"][part], positions, None, labels=batch["labels"][part])
                gradient_alone = gradients_of(alone)
                packed = together()[part]
                results.append(("losses", (packed - alone).abs().max().item()))
                both = zip(gradients_of(packed), gradient_alone, strict=True)
                results += [("gradients", ((a - b).abs().max() / b.abs().max().clamp(min=1)).item()) for a, b in both]
        return results


PRECISION = {"bf16": True} if torch.cuda.is_available() else {}
"""Variable-length attention of a GPU has no fp32."""
EXACTNESS = 1e3 if PRECISION else 1
GROUPED = {"group_query_attention": True, "num_query_groups": 2}


@pytest.mark.parametrize("by_text", [False, True])
@pytest.mark.parametrize("positions", ["rope", "learned_absolute"])
def test_packed_is_unpacked(world1: World, data: str, positions: str, by_text: bool) -> None:
    """A sample has the same losses and gradients packed and alone, and logits of a prompt have no gradient."""
    flags = {"bcd_num_blocks": 1, "num_layers": 2, "position_embedding_type": positions} | GROUPED
    flags |= PRECISION if by_text else {}
    (result,) = world1.run(packed_and_alone, fine_tuning.config_of(data, **flags), by_text=by_text)
    assert {name for name, _ in result} == {"masked", "losses", "gradients"}
    assert [value for name, value in result if name == "masked"] == [0.0]
    assert max(value for _, value in result) < 2e-5 * (EXACTNESS if by_text else 1)


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}
BY_TEXT: dict[str, dict[str, Any]] = {
    "full_recomputation": FULL,
    "selective_recomputation": {"recompute_granularity": "selective", "position_embedding_type": "rope"} | GROUPED,
    "stages": worlds.PIPELINE | {"bcd_layout": "submodel"},
    "interleaved": worlds.PIPELINE | {"bcd_layout": "interleaved"},
    "tensor": worlds.CUTS["tensor2"] | {"sequence_parallel": True},
    "on_host": {"bcd_preset": "finetune", "bcd_num_blocks": None, "bcd_steps_per_block": None}
    | {"bcd_layers_on": "host", "bcd_saved_inputs": "host", "position_embedding_type": "rope"},
    "prefix_cache": {"bcd_sample_ratio": 0.5, "bcd_steps_per_block": 2, "bcd_prefix_cache": "cache"},
    "documents": {"sft": False, "reset_attention_mask": True, "seq_length": 512, "max_position_embeddings": 512},
}


def trained_on_texts(config: RunConfig, *, by_text: bool) -> tuple[dict[str, Any], int]:
    """Return a run, and the most texts in a microbatch of variable-length attention."""
    with texts.attention_of_texts(by_text=by_text) as attention:
        run = worlds.train_run(config)
        return run, max((len(call.args[3]) - 1 for call in attention.call_args_list), default=0)


@pytest.mark.parametrize("case", BY_TEXT)
def test_without_masks(world1: World, world2: World, data: str, text_data: str, tmp_path: Path, case: str) -> None:
    """Variable-length attention trains and evaluates like masks, whatever runs the layers."""
    flags = {"train_iters": 6, "eval_iters": 1, "eval_interval": 3, "lr": 1e-3} | BY_TEXT[case] | PRECISION
    path = data if flags.get("sft", True) else text_data
    world = world1 if flags.get("world_size", 1) == 1 else world2
    runs = []
    for by_text in (False, True):
        if flags.get("bcd_prefix_cache"):
            flags |= {"bcd_prefix_cache": tmp_path / str(by_text)}
        runs.append(world.run(trained_on_texts, fine_tuning.config_of(path, **flags), by_text=by_text))
    for (masked, no_texts), (result, num_texts) in zip(*runs, strict=True):
        assert no_texts == 0 and num_texts > 2, "a microbatch has at most two sequences"
        assert result["losses"] == pytest.approx(masked["losses"], rel=1e-5 * EXACTNESS)
        assert result["grad_norms"] == pytest.approx(masked["grad_norms"], rel=1e-3 * EXACTNESS**0.5)
        for mine, other in zip(result["evaluations"], masked["evaluations"], strict=True):
            assert mine[:2] == other[:2] and mine[2] == pytest.approx(other[2], rel=1e-5 * EXACTNESS)


def test_an_epoch_has_every_record_once(world1: World, data: str, records: list[dict[str, str]]) -> None:
    """Each epoch has every record once, in another order."""
    flags = PLAIN | {"num_layers": 1, "global_batch_size": 2, "no_sft_packing": True, "bcd_steps_per_block": 100}
    (result,) = world1.run(run_of, fine_tuning.config_of(data, **flags, train_iters=60))
    texts = [fine_tuning.text_of(sample["ids"]) for step in result["samples"] for sample in step]
    expected = sorted(record["prompt"] + record["completion"] for record in records)
    first, second = texts[:60], texts[60:]
    assert sorted(first) == sorted(second) == expected
    assert first != second != expected


def test_bad_records_are_left_out(world1: World, records: list[dict[str, str]], tmp_path: Path) -> None:
    """A run with --sft-skip-bad-records trains on the others and reports; without it the stored samples are refused."""
    bad = {"prompt": "p", "completion": ""}
    data = fine_tuning.write_records(tmp_path / "data.jsonl", [*records[:9], bad])
    flags = PLAIN | {"num_layers": 1, "train_iters": 2}
    (result,) = world1.run(run_of, fine_tuning.config_of(data, **flags, sft_skip_bad_records=True))
    assert any("1 bad record is left out" in note and "line 10 has an empty answer" in note for note in result["notes"])
    assert "p" not in {fine_tuning.text_of(sample["ids"]) for step in result["samples"] for sample in step}
    with pytest.raises(Exception, match="line 10 has an empty answer.*--sft-skip-bad-records"):
        world1.run(run_of, fine_tuning.config_of(data, **flags))


@pytest.fixture(scope="module")
def weights(world1: World, data: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Flags that load one set of first weights."""
    folder = str(tmp_path_factory.mktemp("weights"))
    world1.run(worlds.save_initial_weights, fine_tuning.config_of(data), folder)
    return {"load": folder, "finetune": True}


def test_two_stages(world1: World, world2: World, data: str, weights: dict[str, Any]) -> None:
    """Two stages have the losses, gradient norms and evaluations of one rank."""
    flags = weights | {"lr": 1e-3, "train_iters": 4, "eval_iters": 1, "eval_interval": 3}
    (expected,) = world1.run(worlds.train_run, fine_tuning.config_of(data, **flags), blocks_of_stages=2)
    result = world2.run(worlds.train_run, fine_tuning.config_of(data, **flags | worlds.PIPELINE))[1]
    assert result["blocks"] == expected["blocks"]
    assert result["losses"] == pytest.approx(expected["losses"], rel=2e-5)
    assert result["grad_norms"] == pytest.approx(expected["grad_norms"], rel=1e-3)
    for (*left, loss), (*two, wanted) in zip(result["evaluations"], expected["evaluations"], strict=True):
        assert left == two and loss == pytest.approx(wanted, rel=2e-5)


def test_resumed_in_an_epoch(world2: World, data: str, tmp_path: Path) -> None:
    """A run that stops inside an epoch and resumes equals the uninterrupted run."""
    flags = {"bcd_num_blocks": 2, "bcd_steps_per_block": 3, "global_batch_size": 4, "train_iters": 8, "eval_iters": 1}
    flags |= {"eval_interval": 4, "pipeline_model_parallel_size": 2, "save": tmp_path}
    config = fine_tuning.config_of(data, world_size=2, **flags)
    assert world2.run(resumed_runs.stopped_and_resumed, config, (5,), str(tmp_path)) == [[], []]
