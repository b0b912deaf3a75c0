"""Models: loading them, knowing their parts, tapping what goes on inside."""
