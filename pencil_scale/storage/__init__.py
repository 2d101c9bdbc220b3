"""Where everything is stored: URLs, the layout, atomic and conditional writes, leases."""
