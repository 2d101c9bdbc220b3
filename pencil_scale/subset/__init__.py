"""Class-balanced subsets of the catalogue."""
