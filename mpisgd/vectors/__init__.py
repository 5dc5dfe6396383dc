"""The model as one flat vector, its slices, and their memory."""
