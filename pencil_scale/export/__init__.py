"""Repaired labels as files for other tools."""
