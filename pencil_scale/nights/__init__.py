"""Nightly re-cleaning: crawl, carry over, train, examine, publish."""
