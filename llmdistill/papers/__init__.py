"""What reproduces the four papers: their tables, grids, stages, tasks and figures. Nothing else imports it."""
