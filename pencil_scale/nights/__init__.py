"""Nights: a growing crawl cleaned again and again, one manifest a night, and CURRENT for the one in use."""
