"""What it costs to keep tenants apart, and what still leaks."""
