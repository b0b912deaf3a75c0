"""From files to batches: reading, encoding, sampling, collating."""
