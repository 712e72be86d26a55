"""Benchmarks of kernels and of the system, one file per subject: `python -m bench` from the root."""
