"""Makes the texts that ship in llmdistill/embedded/data, and questions on the same facts."""
