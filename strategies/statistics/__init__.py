"""Sums of a frozen backbone's features, and the classifier heads that follow from them in closed form."""
