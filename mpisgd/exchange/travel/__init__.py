"""Other ways of bodies than whole messages, with the same bits: in chunks, or in shared memory."""
