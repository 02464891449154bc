"""Where prefix hits go."""
