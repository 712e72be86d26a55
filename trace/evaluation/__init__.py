"""Accuracy on held-out tasks: inside a training run, and of any model on any of the sets."""
