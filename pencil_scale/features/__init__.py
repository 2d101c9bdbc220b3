"""Features: what a frozen network makes of every image, as a table beside the labels."""
