"""The GLUE benchmark: fine-tune a model on each task by the main job's engine, choose on dev, and report."""
