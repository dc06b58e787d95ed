"""The script fine-tunes a published model on records and exports a model that answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from support import fine_tuning, huggingface_models
from support.forked_runs import ForkedRuns

TALK = [{"role": "user", "content": "Hi!"}, {"role": "assistant", "content": "Hello."}]
LONG = [{"role": "user", "content": "Tell."}, {"role": "assistant", "content": "Yes!"}] * 3


def metrics_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_conversations_from_model_to_model(runs: ForkedRuns, tmp_path: Path) -> None:
    """Fine-tuning on conversations takes the model's tokenizer and template, reports cut samples, trains whole epochs,
    and exports a model that has learned an answer."""
    model = huggingface_models.write_model("llama_tied", tmp_path / "model")
    fine_tuning.tokenizer_folder(model, fine_tuning.CHATML, special=fine_tuning.SPECIAL[1:])
    records = [{"messages": TALK}] * 30 + [{"messages": LONG}] * 2
    fine_tuning.write_records(tmp_path / "records.jsonl", records)
    flags = "--sft --data-path records.jsonl --load-hf model --save-hf trained --num-epochs 12 --split 75,25,0"
    flags += " --seq-length 64 --micro-batch-size 2 --global-batch-size 4 --lr 1e-2 --lr-warmup-fraction 0.1"
    flags += " --pipeline-model-parallel-size 2 --bcd-num-blocks 2 --bcd-steps-per-block 5 --num-workers 0"
    flags += " --log-interval 1 --eval-interval 8 --metrics-file metrics.jsonl"
    results = runs.run(flags.split(), folder=tmp_path, num_ranks=2, script="pretrain_llama_bcd")
    assert [(rank.code, rank.stderr) for rank in results] == [(0, "")] * 2
    said = results[0].stdout
    assert "--seq-length 64" in said, "two samples are longer"
    lines = metrics_of(tmp_path / "metrics.jsonl")
    steps = [line for line in lines if "grad_norm" in line]
    num_sequences = int(said.split("training 24 samples in ")[1].split()[0])
    assert len(steps) == -(-num_sequences * 12 // 4) and steps[-1]["iteration"] == len(steps)
    assert steps[-1]["loss"] < 0.5 * steps[0]["loss"]
    assert len(list((tmp_path / "cache" / "sft").iterdir())) == 1

    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "trained")
    trained = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "trained", dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(TALK[:1], add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = trained.generate(**prompt, max_new_tokens=7, do_sample=False, pad_token_id=0)
    answer = tokenizer.decode(output[0, prompt["input_ids"].size(1) :])
    assert answer == "Hello.<|im_end|>"
