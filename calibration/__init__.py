"""Measure, fit, keep as a profile, validate: what the simulator charges for a step, and how far it is off."""
