"""From shards to catalogue rows: ids, labels, duplicates, damage."""
