"""The review page, its audit, and the story of one sample."""
