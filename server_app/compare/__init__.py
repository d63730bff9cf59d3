"""Several methods on the same uploads: cells, table and plot."""
