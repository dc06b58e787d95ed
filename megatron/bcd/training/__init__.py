"""The run: setup, state, phase, loop, evaluation, resume."""
