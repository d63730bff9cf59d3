"""Compares several methods on the same uploads: cells, table and plots."""
