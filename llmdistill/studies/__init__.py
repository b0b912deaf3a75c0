"""Studies of many runs: trials, the choice of settings on the validation set, and the table of the results."""
