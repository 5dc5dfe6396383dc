"""The virtual world: greenlet ranks in virtual time, blocking messages over a modelled network."""
