"""The parts of a training run around the trainer: setup, counters, evaluation, outputs, reports."""
