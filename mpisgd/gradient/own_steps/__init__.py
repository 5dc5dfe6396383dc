"""A learner's own steps between two pulls."""
