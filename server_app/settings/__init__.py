"""Settings: from keys and files to a checked job."""
