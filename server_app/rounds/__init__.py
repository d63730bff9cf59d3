"""Runs in rounds beside each other: table and plot over the rounds."""
