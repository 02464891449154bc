"""Other tools' result files, read into one canonical record."""
