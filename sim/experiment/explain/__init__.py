"""Where one request's time went."""
