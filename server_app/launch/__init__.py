"""Starting, following and ending a run."""
