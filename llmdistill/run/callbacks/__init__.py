"""What watches a training, one file each: `Trainer.run` calls a list of them after each step."""
