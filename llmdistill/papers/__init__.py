"""What reproduces the four papers: their tables, grids, stages, tasks and figures. Only commands import it."""
