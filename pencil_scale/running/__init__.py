"""A run: its checks, its driver, its workers, its end."""
