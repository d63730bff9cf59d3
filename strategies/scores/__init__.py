"""Scores of classifiers: sums that add up exactly, values with intervals, paired differences."""
