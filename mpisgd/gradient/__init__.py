"""What a learner computes: a chain of small stages, from a mini-batch to what is pushed."""
