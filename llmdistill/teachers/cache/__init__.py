"""The cache of a teacher: its folder, what makes it, what it comes from, and the teacher that reads it."""
