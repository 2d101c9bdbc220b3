"""The label table's files and snapshots, the exchange between ranks, and what the labels came to."""
