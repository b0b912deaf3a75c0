"""The commands, a file each; every one is thin over the library."""
