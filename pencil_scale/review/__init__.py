"""The review page, its audit, and the history of one sample."""
