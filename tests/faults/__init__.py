"""What goes wrong, and what is said and done then: every bad input, and campaigns of flipped bits and malformed messages."""
