"""A/B: two setups, the same requests, what differs and how sure that is; in one body, or in both."""
