"""A learner's gradient: a chain of stages from mini-batch to push."""
