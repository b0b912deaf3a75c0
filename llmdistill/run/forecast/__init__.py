"""What a training will need before it is launched: memory by part, the time of a step, and settings that fit."""
