"""How much of one class beside another."""
