"""Before a run: its memory and time, the dry run, and the check of one batch."""
