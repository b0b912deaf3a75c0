"""Reports: tables, plots, pages and cards, from what runs left in their folders."""
