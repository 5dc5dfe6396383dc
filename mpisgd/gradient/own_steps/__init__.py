"""Steps that a learner takes by itself, between two pulls."""
