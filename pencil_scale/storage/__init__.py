"""Objects that change only as expected, and leases over them, on any storage."""
