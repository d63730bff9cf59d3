"""Rules that combine the logits of M members into one prediction, in torch and in numpy."""
