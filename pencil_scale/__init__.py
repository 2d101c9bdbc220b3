"""Repairs the labels of web-scale noisy image datasets with PENCIL, on Ray."""

import logging

__version__ = "0.1.0"

# MLflow sets the root logger to ERROR when it is imported, which would hide our warnings.
logging.getLogger(__name__).setLevel(logging.WARNING)
