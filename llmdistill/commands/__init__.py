"""The commands, one file each; each is a thin layer over the library."""
