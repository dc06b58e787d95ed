"""Text from a trained model, and what the model thinks of a text: generation and log-likelihoods in one process.

docs/generation.md has the commands. Nothing here runs during training (training/samples.py does).
"""
