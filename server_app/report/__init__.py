"""What a finished run says: scores, tables, plots and the model card."""
