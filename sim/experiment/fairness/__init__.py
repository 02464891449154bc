"""Who is served how much, and at whose cost."""
