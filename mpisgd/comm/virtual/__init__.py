"""The virtual world: ranks that are greenlets, in virtual time; blocking messages over a modelled network."""
