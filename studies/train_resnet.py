"""Train a ResNet on CIFAR, in full or in blocks: table 2 of the paper (arXiv 2506.12037) in plain PyTorch.

    python studies/train_resnet.py --model resnet8 --dataset cifar10 --data cifar-10-batches-py --optimizer sgd \\
        --lr 0.1 --epochs 10 --bcd-num-blocks 3 --bcd-steps-per-block 100 --metrics-file out/resnet8.jsonl

--bcd-num-blocks 1 is full training. The learning rate rises over --lr-warmup-iters and then falls to 0 by a cosine. The
model of the last step is evaluated on the test split. studies/resnet_paper.md has the commands for the paper's models.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.append(os.path.join(sys.path[0], "tools"))

import torch
from _parser import Parser, command, run_main
from cifar import NUM_CLASSES, Images, Scale, read_split, training_batches
from torch import nn

from megatron.bcd import BlockCoordinate
from megatron.bcd.config import ReportConfig
from megatron.bcd.metrics.reporter import Reporter
from megatron.bcd.metrics.schema import EvalMetrics, StepMetrics
from megatron.bcd.runtime import device, memory
from megatron.bcd.torch_loop import CHOICES

PROG = "studies/train_resnet.py"
_EVALUATION_BATCH = 500
BASIC_DEPTHS = {"resnet8": 1, "resnet14": 2, "resnet20": 3}
"""Blocks in each of three stages with 16, 32 and 64 channels (He et al., arXiv 1512.03385, section 4.2)."""
BOTTLENECK_DEPTHS = {"resnet50": (3, 4, 6, 3), "resnet101": (3, 4, 23, 3)}
MODELS = (*BASIC_DEPTHS, *BOTTLENECK_DEPTHS)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the parsed flags. Raises ValueError for a bad flag."""
    parser = Parser(prog=PROG, description=__doc__)
    add = parser.add_argument
    add("--model", required=True, choices=MODELS)
    add("--dataset", required=True, choices=[*NUM_CLASSES])
    add("--data", required=True, metavar="FOLDER", help="holds data_batch_1 ... and test_batch, or train and test")
    add("--optimizer", required=True, choices=("sgd", "adam"), help="sgd with a momentum of 0.9, or AdamW")
    add("--lr", required=True, type=float)
    add("--lr-multiplier", type=float, default=1.0, metavar="X", help="factor of --lr, so that several optimizers can "
        "share one grid of rates")  # fmt: skip
    add("--weight-decay", type=float, default=5e-4)
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--epochs", type=int)
    length.add_argument("--train-iters", type=int, metavar="STEPS")
    add("--global-batch-size", type=int, default=128)
    add("--lr-warmup-iters", type=int, default=0, metavar="STEPS")
    add("--num-train", type=int, metavar="N", help="use the first N training images after the validation split's")
    add("--num-validation", type=int, default=0, metavar="N", help="training images used for validation (default: 0)")
    add("--shrink", type=int, default=1, choices=(1, 2, 4), help="average squares of this side: 2 gives 16 x 16 pixels")
    add("--seed", type=int, default=1234)
    add("--log-interval", type=int, default=10, metavar="STEPS")
    add("--eval-interval", type=int, metavar="STEPS", help="steps between validations (default: only at the end)")
    add("--metrics-file", metavar="FILE")
    add("--bcd-num-blocks", type=int, default=3, help="1 is full training, 0 has no block (default: 3)")
    add("--bcd-steps-per-block", type=int, default=100)
    add("--bcd-layout", default="contiguous", choices=CHOICES["layout"], help="(default: contiguous)")
    add("--bcd-order", default="ascending", choices=CHOICES["order"])
    add("--bcd-optimizer-state", default="reset", choices=CHOICES["keep_state"])
    add("--bcd-always-active", metavar="PARTS", help="none, or any of norms,biases,head (default: none; with "
        "--bcd-inactive-update all of them)")  # fmt: skip
    add("--bcd-inactive-update", default="none", choices=CHOICES["inactive_update"])
    add("--bcd-inactive-lr-ratio", type=float, default=0.2)
    return parser.parse_args(argv)


def build_resnet(name: str, num_classes: int) -> Any:
    """Build one of MODELS with a first convolution of 3 x 3 that keeps the size, because images are small.

    Shortcuts that change the shape are 1 x 1 convolutions: ResNet-14 for 10 classes has 175,258 parameters, as in the
    paper (arXiv 2506.12037, table 10: at 12 bytes each, 2.01 MiB).
    """
    import transformers

    if name in BASIC_DEPTHS:
        shape: dict[str, Any] = {
            "embedding_size": 16,
            "hidden_sizes": [16, 32, 64],
            "depths": [BASIC_DEPTHS[name]] * 3,
            "layer_type": "basic",
        }
    else:
        shape = {
            "embedding_size": 64,
            "hidden_sizes": [256, 512, 1024, 2048],
            "depths": list(BOTTLENECK_DEPTHS[name]),
            "layer_type": "bottleneck",
        }
    model = transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=num_classes, **shape))
    stem = model.resnet.embedder
    stem.embedder.convolution = nn.Conv2d(3, shape["embedding_size"], kernel_size=3, padding=1, bias=False)
    nn.init.kaiming_normal_(stem.embedder.convolution.weight, mode="fan_out", nonlinearity="relu")
    stem.pooler = nn.Identity()
    return model.to(memory_format=torch.channels_last)


def residual_blocks(model: Any) -> list[nn.Module]:
    """Return the layers that block coordinate descent divides into blocks, in depth order."""
    return [layer for stage in model.resnet.encoder.stages for layer in stage.layers]


def build_optimizer(arguments: argparse.Namespace, model: Any) -> BlockCoordinate:
    """Build the optimizer. Raises ValueError if flags do not fit the model."""

    def build_inner(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        settings = {"lr": arguments.lr * arguments.lr_multiplier, "weight_decay": arguments.weight_decay}
        if arguments.optimizer == "adam":
            return torch.optim.AdamW(parameters, **settings)
        return torch.optim.SGD(parameters, momentum=0.9, **settings)

    parts = arguments.bcd_always_active
    always_active = None if parts is None else [] if parts == "none" else parts.split(",")
    return BlockCoordinate(
        model,
        build_inner,
        layers=residual_blocks(model),
        num_blocks=arguments.bcd_num_blocks,
        steps_per_block=arguments.bcd_steps_per_block,
        layout=arguments.bcd_layout,
        order=arguments.bcd_order,
        keep_state=arguments.bcd_optimizer_state,
        always_active=always_active,
        inactive_update=arguments.bcd_inactive_update,
        inactive_lr_ratio=arguments.bcd_inactive_lr_ratio,
        seed=arguments.seed,
    )


def learning_rate_factor(step: int, *, warmup: int, total: int) -> float:
    """Return the factor of --lr in a step. `step` is the number of completed steps."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


@torch.no_grad()
def evaluate(model: Any, images: Images, scale: Scale) -> tuple[float, float]:
    """Return the mean loss and the accuracy (0 to 1) over all images."""
    model.eval()
    loss, num_correct = 0.0, 0
    for start in range(0, len(images), _EVALUATION_BATCH):
        part = images.slice(start, start + _EVALUATION_BATCH)
        logits = model(scale(part.pixels_NCHW)).logits
        loss += torch.nn.functional.cross_entropy(logits, part.labels_N, reduction="sum").item()
        num_correct += int((logits.argmax(dim=1) == part.labels_N).sum())
    model.train()
    return loss / len(images), num_correct / len(images)


class Training:
    """The model, optimizer and images of one run, all on the device."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        place, folder = device.current(), arguments.data
        images, self.test = (_move(read_split(folder, arguments.dataset, name), place) for name in ("train", "test"))
        held_out, stop = arguments.num_validation, arguments.num_train
        stop = stop and held_out + stop
        self.validation, self.train = images.slice(0, held_out), images.slice(held_out, stop)
        if held_out < 0 or len(self.train) < arguments.global_batch_size:
            raise ValueError(
                f"--num-validation {held_out} leaves {len(self.train)} images of {len(images)} to train on: must be at "
                f"least --global-batch-size {arguments.global_batch_size}"
            )
        self.scale = Scale.of(self.train, shrink=arguments.shrink)
        steps_per_epoch = len(self.train) // arguments.global_batch_size
        self.train_iters = arguments.train_iters or arguments.epochs * steps_per_epoch
        torch.manual_seed(arguments.seed)
        self.model = build_resnet(arguments.model, NUM_CLASSES[arguments.dataset]).to(place)
        self.optimizer = build_optimizer(arguments, self.model)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer,
            lambda step: learning_rate_factor(step, warmup=arguments.lr_warmup_iters, total=self.train_iters),
        )

    def run(self, reporter: Reporter) -> None:
        """Train and evaluate."""
        arguments, optimizer = self.arguments, self.optimizer
        batches = training_batches(self.train, self.scale, batch_size=arguments.global_batch_size, seed=arguments.seed)
        self.model.train()
        losses, started = [], time.perf_counter()
        for iteration in range(1, self.train_iters + 1):
            place = (optimizer.cycle, optimizer.phase, optimizer.block)
            rate = optimizer.param_groups[0]["lr"]
            loss, gradient_bytes = self._step(*next(batches))
            losses.append(loss)
            if iteration % arguments.log_interval == 0 or iteration == self.train_iters:
                elapsed_ms = (time.perf_counter() - started) * 1000 / len(losses)
                mean = torch.stack(losses).mean().item()
                reporter.step(self._metrics(iteration, place, mean, rate, elapsed_ms, gradient_bytes))
                losses, started = [], time.perf_counter()
            if arguments.eval_interval and iteration % arguments.eval_interval == 0 and iteration < self.train_iters:
                paused = time.perf_counter()
                self._evaluate(reporter, iteration, "validation", self.validation)
                started += time.perf_counter() - paused
        self._evaluate(reporter, self.train_iters, "validation", self.validation, is_final=True)
        self._evaluate(reporter, self.train_iters, "test", self.test, is_final=True)

    def _step(self, pixels: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Take a step. Return the loss, and the bytes of all gradients at their peak, after the backward pass."""
        self.optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(self.model(pixels).logits, labels)
        loss.backward()
        gradient_bytes = sum(p.grad.nbytes for p in self.model.parameters() if p.grad is not None)
        self.optimizer.step()
        self.scheduler.step()
        return loss.detach(), gradient_bytes

    def _metrics(
        self, iteration: int, place: tuple[int, int, int], loss: float, rate: float, ms: float, gradient_bytes: int
    ) -> StepMetrics:
        state = self.optimizer.optimizer_state_bytes
        cycle, phase, block = place
        batch_size = self.arguments.global_batch_size
        return StepMetrics(
            iteration=iteration,
            consumed_samples=iteration * batch_size,
            cycle=cycle,
            phase=phase,
            block=block,
            loss=loss,
            learning_rate=rate,
            grad_norm=None,
            step_time_ms=ms,
            tokens_per_second=batch_size * 1000 / ms,
            model_state_bytes=(sum(p.nbytes for p in self.model.parameters()) + gradient_bytes + state,),
            peak_memory_bytes=(memory.peak_memory_bytes(),),
            gradient_bytes=(gradient_bytes,),
            optimizer_state_bytes=(state,),
            host_state_bytes=(self.optimizer.host_state_bytes,),
            global_batch_size=batch_size,
            data_seen=min(1.0, iteration * batch_size / len(self.train)),
        )

    def _evaluate(
        self, reporter: Reporter, iteration: int, split: str, images: Images, *, is_final: bool = False
    ) -> None:
        if not len(images):
            return
        loss, accuracy = evaluate(self.model, images, self.scale)
        reporter.evaluation(
            EvalMetrics(
                iteration=iteration,
                consumed_samples=iteration * self.arguments.global_batch_size,
                split=split,
                loss=loss,
                accuracy=accuracy,
                is_final=is_final,
            )
        )


def _move(images: Images, place: torch.device) -> Images:
    return Images(pixels_NCHW=images.pixels_NCHW.to(place), labels_N=images.labels_N.to(place))


@command(PROG)
def main(argv: Sequence[str]) -> None:
    arguments = parse_arguments(argv)
    training = Training(arguments)
    with Reporter(ReportConfig(metrics_file=arguments.metrics_file), train_iters=training.train_iters) as reporter:
        num_parameters = sum(p.numel() for p in training.model.parameters())
        reporter.note(f"parameters {num_parameters:,} of {arguments.model} on {device.name()}")
        reporter.note(training.optimizer.describe())
        training.run(reporter)


if __name__ == "__main__":
    run_main(main)
