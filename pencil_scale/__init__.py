"""Repairs the labels of web-scale noisy image datasets with PENCIL, on Ray."""

__version__ = "0.1.0"
