"""What an upload is and must be: its facts, its checks, its kinds, and the forms in which models travel."""
