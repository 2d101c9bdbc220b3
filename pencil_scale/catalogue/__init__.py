"""The catalogue: every sample in the shards, one row each, and how it is built."""
