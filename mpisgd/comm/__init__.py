"""What the exchange asks of a communicator, the vocabulary of its messages, and signals; its two worlds are below."""
