"""Fine-tuning on tasks (GLUE, XNLI, SQuAD, MLQA): a grid of runs for each, the choice on dev, and the scores."""
