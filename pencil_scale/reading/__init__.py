"""Bytes of tars and images: headers, ranges, decoding, batches."""
