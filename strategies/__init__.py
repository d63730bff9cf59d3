"""One-shot federated learning on Flower: clients upload a trained model once, the server does the rest."""
