"""Many runs: trials side by side, a choice on the validation set, and the table of a study."""
