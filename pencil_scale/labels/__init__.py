"""The label table: its files, snapshots, owners, pins, and published labels."""
