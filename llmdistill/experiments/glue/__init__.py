"""The GLUE benchmark: fine-tunes a model on each task, chooses the settings on the dev sets, and reports the scores."""
