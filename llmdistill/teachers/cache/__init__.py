"""The cache of a teacher: its folder, what writes it, and the teacher that reads it."""
