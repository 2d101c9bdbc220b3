"""Exports: repaired labels as files for other tools."""
