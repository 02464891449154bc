"""How many GPUs: the largest rate at objectives, with its interval, and the plan that follows from it."""
