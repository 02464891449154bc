"""Experiments over runs: honest comparisons, capacity, the price of isolation. Nothing here knows which body runs."""
