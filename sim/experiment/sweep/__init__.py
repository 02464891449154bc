"""A setup at many points of its knobs."""
