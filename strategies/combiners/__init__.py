"""How the logits of M members become one prediction: the rules, in torch and in numpy."""
