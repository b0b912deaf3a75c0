"""What watches a training: `Trainer.run` calls a list of them after each step."""
