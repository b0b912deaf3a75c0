"""What is learnt and how it is scored, a file a task, with the metrics beside them."""
