"""The parts of make_shards: sources, samples, and writing them."""
